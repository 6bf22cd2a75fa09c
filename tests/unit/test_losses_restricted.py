"""The restricted vocabulary: what is kept, and that nothing else changes."""

import pytest
import torch

from mtp.losses import AlignedTargets, Objective, chunked_loss
from mtp.losses.restricted import kept_tokens
from mtp.recipe import Recipe, RestrictedVocabulary

TERMS = ("ce", "kl", "tv", "lk", "e2e_tv")


def aligned_case(seed, steps=3, targets=12, vocabulary=40, size=8):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(steps, targets, size, generator=generator).requires_grad_()
    aligned = AlignedTargets(
        student=student,
        teacher=torch.randn(targets, size, generator=generator),
        targets=torch.randint(0, vocabulary, (targets,), generator=generator),
        valid=torch.ones(steps, targets, dtype=torch.bool),
        weights=torch.ones(targets),
        rows=torch.zeros(targets, dtype=torch.long),
        columns=torch.arange(targets) + 2,
    )
    return aligned, torch.randn(vocabulary, size, generator=generator)


def loss_and_gradient(aligned, lm_head, objective, **keywords):
    weights = torch.ones(aligned.student.shape[0])
    result = chunked_loss(aligned, lm_head, objective, weights, **keywords)
    return result.loss, torch.autograd.grad(result.loss, aligned.student)[0]


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.99])
def test_kept_are_top_p_data_and_favourites(top_p):
    aligned, lm_head = aligned_case(1)
    logits = aligned.teacher @ lm_head.T
    restricted = RestrictedVocabulary(top_p=top_p, probe_every=5, favourites=2)
    found = kept_tokens(aligned.student, logits, aligned.targets, lm_head, restricted)
    expected = set(aligned.targets.tolist())
    for row in logits.softmax(-1).tolist():
        mass = 0.0
        for token in sorted(range(len(row)), key=lambda token: -row[token]):
            if mass >= top_p:
                break
            expected.add(token)
            mass += row[token]
    for target in (0, 5, 10):
        for step in aligned.student:
            expected |= set((lm_head @ step[target]).topk(2).indices.tolist())
    assert found.tolist() == sorted(expected)


@pytest.mark.parametrize("term", TERMS)
def test_the_losses_are_those_of_the_kept_tokens(term):
    aligned, lm_head = aligned_case(2)
    lm_head = lm_head * 3
    objective = Objective(**{term: 1.0})
    restricted = RestrictedVocabulary(top_p=0.7, probe_every=4, favourites=1)
    logits = aligned.teacher @ lm_head.T
    kept = kept_tokens(aligned.student, logits, aligned.targets, lm_head, restricted)
    assert len(kept) < 36  # of 40
    smaller = AlignedTargets(
        **{**vars(aligned), "targets": torch.tensor([kept.tolist().index(t)
                                                     for t in aligned.targets.tolist()])}
    )  # fmt: skip
    expected = loss_and_gradient(smaller, lm_head[kept], objective)
    found = loss_and_gradient(aligned, lm_head, objective, restricted=restricted, chunk_size=100)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    full = loss_and_gradient(aligned, lm_head, objective)
    assert (found[1] - full[1]).norm() > 1e-4 * full[1].norm()  # biased, as is said


@pytest.mark.parametrize("term", TERMS)
def test_all_that_the_base_may_say_is_everything(term):
    aligned, lm_head = aligned_case(3)
    objective = Objective(**{term: 1.0})
    restricted = RestrictedVocabulary(top_p=1.0, favourites=40)
    found = loss_and_gradient(aligned, lm_head, objective, restricted=restricted, chunk_size=5)
    expected = loss_and_gradient(aligned, lm_head, objective)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_it_is_off_by_default():
    restricted = Recipe().loss.restricted
    assert restricted.top_p == 0
    aligned, lm_head = aligned_case(4)
    found = loss_and_gradient(aligned, lm_head, Objective(kl=1.0), restricted=restricted)
    expected = loss_and_gradient(aligned, lm_head, Objective(kl=1.0))
    assert torch.equal(found[1], expected[1])
