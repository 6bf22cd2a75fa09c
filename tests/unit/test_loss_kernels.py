"""The GPU's kernels against the plain terms in float64: on a GPU, or in Triton's interpreter."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds")

from mtp.losses import kernels  # noqa: E402
from mtp.losses.terms import Objective, token_terms  # noqa: E402

OBJECTIVES = {
    "recipe": Objective(kl=1.0, ce=0.1),
    "ce": Objective(ce=1.0),
    "tv": Objective(tv=1.0, temperature=0.6),
    "lk": Objective(lk=1.0),
    "e2e_tv": Objective(e2e_tv=1.0, temperature=1.7),
    "all": Objective(ce=0.3, kl=0.5, tv=0.7, lk=0.2, e2e_tv=0.4),
    "ce and kl, scaled": Objective(ce=0.3, kl=0.5, temperature=0.6),
}
VOCABULARY = 5003  # two blocks and a part of one


def logits(seed=0, steps=2, targets=3):
    """A head near its base; logits of a spread near 10, so that most probabilities are tiny."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(targets, VOCABULARY, generator=generator) * 3
    noise = torch.randn(steps, targets, VOCABULARY, generator=generator)
    labels = torch.tensor([0, VOCABULARY - 1, 4096][:targets])
    return (teacher + noise).to(DEVICE), teacher.to(DEVICE), labels.to(DEVICE)


def compared(found, expected):
    return [
        *((found[i][name], expected[i][name]) for i in (0, 1) for name in expected[i]),
        (found[2], expected[2]),
    ]


def largest_error(found, expected):
    return max(
        ((f.double() - e.double()).norm() / e.double().norm().clamp(min=1e-30)).item()
        for f, e in compared(found, expected)
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_and_gradients_equal_the_plain_terms(name):
    head, base, labels = logits()
    expected = token_terms(head.double(), base.double(), labels, OBJECTIVES[name])
    found = kernels.token_terms(head, base, labels, OBJECTIVES[name], torch.float32)
    assert set(found[0]) == set(expected[0]) and set(found[1]) == set(expected[1])
    assert largest_error(found, expected) < 1e-5


def test_gradients_in_bfloat16_are_rounded_once():
    head, base, labels = logits()
    expected = token_terms(head.double(), base.double(), labels, OBJECTIVES["all"])
    found = kernels.token_terms(head, base, labels, OBJECTIVES["all"], torch.bfloat16)
    assert all(gradient.dtype == torch.bfloat16 for gradient in found[1].values())
    assert largest_error((found[0], found[1], expected[2]), expected) < 4e-3


@pytest.mark.parametrize("broken", ["label", "base", "last logit"])
def test_negative_control_what_is_broken_is_seen(broken):
    head, base, labels = logits()
    expected = token_terms(head.double(), base.double(), labels, OBJECTIVES["all"])
    if broken == "label":
        labels[0] += 1
    elif broken == "base":
        base[1] = base[0]
    else:
        head[0, 0, -1] = 40.0  # of the block that is not full
    found = kernels.token_terms(head, base, labels, OBJECTIVES["all"], torch.float32)
    assert largest_error(found, expected) > 1e-3
