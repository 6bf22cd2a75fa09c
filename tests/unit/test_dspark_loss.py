"""Terms against float64 written out token by token, and what the public trainer leaves out."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from dspark_reference import slot_logits
from dspark_tiny import TINY, random_draft

from mtp.dspark.loss import base_targets, slot_terms
from mtp.dspark.vocabulary import DraftVocabulary

NUM_SLOTS, NUM_POSITIONS = 9, 5


@pytest.fixture(scope="module")
def case():
    """Slots, three of which share a position, and a base that often says what can't be drafted."""
    generator = torch.Generator().manual_seed(5)
    kept = torch.arange(0, 24, 2)
    vocabulary = DraftVocabulary(kept=kept, vocab_size=24)
    lm_head = torch.randn(24, TINY.hidden_size, generator=generator)
    return {
        "model": random_draft(), "vocabulary": vocabulary, "lm_head": lm_head,
        "hidden": torch.randn(NUM_SLOTS, TINY.hidden_size, generator=generator),
        "previous": torch.randint(0, 24, (NUM_SLOTS,), generator=generator),
        "base": torch.randn(NUM_POSITIONS, TINY.hidden_size, generator=generator),
        "positions": torch.tensor([0, 0, 1, 2, 2, 3, 4, 0, 1]),
    }  # fmt: skip


def computed(case, **changes):
    case = case | changes
    targets = base_targets(case["base"], case["lm_head"])
    return slot_terms(
        case["model"], case["hidden"], case["previous"], targets, case["positions"],
        case["lm_head"][case["vocabulary"].kept], case["vocabulary"].draft_ids,
        chunk_size=case.get("chunk_size"),
    )  # fmt: skip


def reference(case, number, *, inside_only=False):
    """(ce, tv, bce, agrees) of one slot in float64, differentiable."""
    weights = {n: p.double() for n, p in case["model"].named_parameters()}
    logits, sure = slot_logits(weights, case["hidden"][number].double(), case["previous"][number])
    kept = case["vocabulary"].kept.tolist()
    base = case["lm_head"].double() @ case["base"][case["positions"][number]].double()
    p = (base[kept] if inside_only else base).softmax(0)
    q = logits.softmax(0)
    if inside_only:
        overlap = sum(torch.minimum(p[i], q[i]) for i in range(len(kept)))
    else:
        overlap = sum(torch.minimum(p[token], q[i]) for i, token in enumerate(kept))
    top = int(base.argmax())
    ce = -q[kept.index(top)].log() if top in kept else 0 * q.sum()
    chance, aim = torch.sigmoid(sure), overlap.detach()
    bce = -(aim * chance.log() + (1 - aim) * (1 - chance).log())
    return ce, 1 - overlap, bce, float(kept[int(q.argmax())] == top)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_terms_and_gradients_equal_float64(case, chunk_size):
    hidden = case["hidden"].clone().requires_grad_()
    terms = computed(case, hidden=hidden, chunk_size=chunk_size)
    wanted = [reference(case, number) for number in range(NUM_SLOTS)]
    for name, column in zip(
        ("ce", "tv", "confidence", "agrees"), zip(*wanted, strict=True), strict=True
    ):
        column = torch.tensor(
            [value.item() if hasattr(value, "item") else value for value in column]
        )
        torch.testing.assert_close(getattr(terms, name), column, rtol=1e-5, atol=1e-6)
    model = case["model"]
    model.zero_grad()
    (terms.ce.sum() + 2 * terms.tv.sum() + 3 * terms.confidence.sum()).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    sum(ce + 2 * tv + 3 * bce for ce, tv, bce, _ in wanted).backward()
    assert {n.split(".")[0] for n in found} == {"lm_head", "markov_head", "confidence_head"}
    for name, gradient in found.items():
        wanted_gradient = dict(model.named_parameters())[name].grad
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-6)
    assert hidden.grad.abs().sum() > 0


def test_mass_that_cannot_be_drafted_counts_as_missed(case):
    """Negative control: inside the draft's vocabulary, as the public trainer has it, every slot
    looks better than it is."""
    terms = computed(case)
    inside = torch.tensor(
        [float(reference(case, n, inside_only=True)[1]) for n in range(NUM_SLOTS)]
    )
    assert bool((terms.missed > 0.01).any())
    assert bool((terms.tv >= terms.missed - 1e-6).all())
    assert bool((inside <= terms.tv + 1e-6).all())
    assert (terms.tv - inside).mean() > 0.05


def test_a_token_that_cannot_be_drafted_never_agrees_and_has_no_cross_entropy(case):
    lost = case["vocabulary"].draft_ids[base_targets(case["base"], case["lm_head"]).top] < 0
    lost = lost[case["positions"]]
    terms = computed(case)
    assert bool(lost.any()) and not bool(lost.all())
    assert not terms.ce[lost].any() and bool((terms.ce[~lost] > 0).all())
    blank = random_draft()  # whose most probable token is its first, wherever nothing is
    with torch.no_grad():
        blank.lm_head.weight.zero_()
        blank.markov_head.markov_w2.weight.zero_()
    for model in (case["model"], blank):
        assert not computed(case, model=model).agrees[lost].any()


def test_the_confidence_target_is_not_differentiated(case):
    model = case["model"]
    model.zero_grad()
    computed(case, chunk_size=4).confidence.sum().backward()
    assert model.lm_head.weight.grad is None or not model.lm_head.weight.grad.any()
    model.zero_grad()


def test_a_perfect_draft_has_no_distance(case):
    """The base's own rows as the draft's, no Markov bias, the whole vocabulary."""
    whole = DraftVocabulary(kept=torch.arange(24), vocab_size=24)
    model = random_draft(type(TINY)(**{**TINY.__dict__, "draft_vocab_size": 24}))
    with torch.no_grad():
        model.lm_head.weight.copy_(case["lm_head"])
        model.markov_head.markov_w2.weight.zero_()
    terms = computed(case, model=model, vocabulary=whole, hidden=case["base"][case["positions"]])
    torch.testing.assert_close(terms.tv, torch.zeros(NUM_SLOTS), atol=1e-6, rtol=0)
    assert bool(terms.agrees.all())
