"""Losses against plain loops in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp.losses import Objective, align, chunked_loss


def reference_loss(outputs, hidden, ids, mask, lm_head, objective, weights):
    """Loops over rows, steps and targets; float64; no alignment trick."""
    rows, length = ids.shape
    per_step = []
    for k, output in enumerate(outputs):
        terms = []
        for row in range(rows):
            for target in range(2, length):
                source = target - k - 2
                if not mask[row, target] or source < 0:
                    continue
                log_q = torch.log_softmax(lm_head @ output[row, source], -1)
                log_p = torch.log_softmax(lm_head @ hidden[row, target - 1], -1)
                divergence = sum(
                    math.exp(p) * (p - q) for p, q in zip(log_p.tolist(), log_q, strict=True)
                )
                cross_entropy = -log_q[ids[row, target]]
                terms.append(objective.kl * divergence + objective.ce * cross_entropy)
        mean = sum(terms) / len(terms) if terms else torch.zeros((), dtype=torch.float64)
        per_step.append(weights[k] * mean)
    return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in per_step])


def case(seed, rows, length, steps, vocabulary=11, size=6):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    outputs = [random(rows, length - 1 - k, size).requires_grad_() for k in range(steps)]
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.6
    mask[0, 2] = True
    weights = torch.rand(steps, generator=generator, dtype=torch.float64)
    return outputs, random(rows, length, size), ids, mask, random(vocabulary, size), weights


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    length=st.integers(6, 12),
    steps=st.integers(1, 4),
    chunk=st.integers(1, 40),
    terms=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1.0, 0.1)]),
)
def test_loss_and_gradient_equal_the_reference(seed, rows, length, steps, chunk, terms):
    outputs, hidden, ids, mask, lm_head, weights = case(seed, rows, length, steps)
    objective = Objective(kl=terms[0], ce=terms[1])
    expected = reference_loss(outputs, hidden, ids, mask, lm_head, objective, weights)
    expected_gradients = (
        torch.autograd.grad(expected.sum(), outputs, allow_unused=True, materialize_grads=True)
        if expected.requires_grad
        else [torch.zeros_like(o) for o in outputs]
    )

    single = [o.detach().float().requires_grad_() for o in outputs]
    aligned = align(single, hidden.float(), ids, mask, len(single))
    loss = chunked_loss(aligned, lm_head.float(), objective, weights.float(), chunk_size=chunk)
    gradients = torch.autograd.grad(loss.sum(), single)

    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)


def test_a_target_outside_the_mask_has_no_gradient():
    outputs, hidden, ids, mask, lm_head, weights = case(0, 2, 10, 4)
    mask[:] = False
    mask[1, 6] = True  # step k predicts it from position 4 - k of row 1
    single = [o.detach().float().requires_grad_() for o in outputs]
    aligned = align(single, hidden.float(), ids, mask, len(single))
    chunked_loss(aligned, lm_head.float(), Objective(), weights.float()).sum().backward()
    for k, output in enumerate(single):
        touched = output.grad.abs().sum(-1).nonzero().tolist()
        assert touched == [[1, 4 - k]]


def test_rows_too_short_for_the_last_steps_only_leave_those_out():
    outputs, hidden, ids, mask, lm_head, weights = case(4, 2, 4, 3)  # step 2 has one position
    single = [o.detach().float() for o in outputs]
    five = torch.cat([weights.float(), torch.ones(2)])
    short = align(single, hidden.float(), ids, mask, 5)
    loss = chunked_loss(short, lm_head.float(), Objective(), five)
    expected = chunked_loss(
        align(single, hidden.float(), ids, mask, 3), lm_head.float(), Objective(), weights.float()
    )
    torch.testing.assert_close(loss, torch.cat([expected, torch.zeros(2)]))


def test_kl_is_zero_for_the_teacher_itself_and_not_for_another():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 5, 7, generator=generator)
    targets = torch.zeros(5, dtype=torch.long)
    kl = Objective(kl=1.0, ce=0.0)
    loss, gradient = kl.loss_and_gradient(logits, logits[0], targets)
    assert loss.abs().max() < 1e-6 and gradient.abs().max() < 1e-6
    assert kl.loss_and_gradient(logits, logits[0].flip(-1), targets)[0].min() > 1e-3


@pytest.mark.parametrize("steps", [1, 4])
def test_chunking_does_not_change_the_sum(steps):
    outputs, hidden, ids, mask, lm_head, weights = case(3, 3, 12, steps)
    aligned = align([o.detach().float() for o in outputs], hidden.float(), ids, mask, steps)
    losses = [
        chunked_loss(aligned, lm_head.float(), Objective(), weights.float(), chunk_size=size)
        for size in (1, 3, 1000)
    ]
    torch.testing.assert_close(losses[0], losses[2])
    torch.testing.assert_close(losses[1], losses[2])
