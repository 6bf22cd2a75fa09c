"""Fused losses against plain ones: values, every gradient, and what must not change them."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from loss_reference import reference_loss

from mtp.losses import (
    Objective,
    align,
    category_weights,
    chunked_loss,
    objective_at,
    position_weights,
)
from mtp.losses.fused import choose_terms, default_chunk_size, working_kernels
from mtp.losses.terms import token_terms
from mtp.recipe import LossRecipe, LossStage

TERMS = ("ce", "kl", "tv", "lk", "e2e_tv")


@dataclass
class Case:
    outputs: list
    hidden: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor
    lm_head: torch.Tensor
    position_weights: torch.Tensor
    row_weights: torch.Tensor


def random_case(seed, rows=3, length=10, steps=4, vocabulary=11, size=6, masked=0.3):
    """Values that float32 holds exactly, in float64; rows end early at random; some targets off."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        values = torch.randn(*shape, generator=generator) * scale
        return values.double()

    # Rows too short for the last steps have no outputs of theirs.
    outputs = [normal(rows, length - 1 - k, size).requires_grad_() for k in range(steps)
               if length - 1 - k > 0]  # fmt: skip
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) >= masked
    ends = torch.randint(2, length + 1, (rows, 1), generator=generator)
    mask &= torch.arange(length) < ends
    return Case(
        outputs, normal(rows, length, size), ids, mask, normal(vocabulary, size, scale=0.7),
        torch.rand(steps, generator=generator).double(),
        (torch.rand(rows, generator=generator) + 0.25).double(),
    )  # fmt: skip


def fused(case, objective, dtype, chunk_size=None, counts=None):
    """The fused loss of a case computed in `dtype`, and the gradients by its outputs."""
    outputs = [o.detach().to(dtype).requires_grad_() for o in case.outputs]
    wide = torch.promote_types(dtype, torch.float32)
    aligned = align(
        outputs, case.hidden.to(dtype), case.ids, case.mask, len(case.position_weights),
        case.row_weights.to(wide),
    )  # fmt: skip
    result = chunked_loss(
        aligned, case.lm_head.to(dtype), objective, case.position_weights.to(wide),
        counts=counts, chunk_size=chunk_size,
    )  # fmt: skip
    gradients = torch.autograd.grad(result.loss, outputs, allow_unused=True, materialize_grads=True)
    return result, gradients


def relative_error(found, expected):
    """Of the norm, over all tensors together; absolute where nothing is expected."""
    expected = torch.cat([e.flatten() for e in expected])
    difference = torch.cat([f.double().flatten() for f in found]) - expected
    return (difference.norm() / expected.norm().clamp(min=1e-8)).item()


def reference(case, objective):
    loss = reference_loss(case, objective)
    gradients = [torch.zeros_like(o) for o in case.outputs]
    if loss.requires_grad:
        gradients = torch.autograd.grad(
            loss, case.outputs, allow_unused=True, materialize_grads=True
        )
    return loss.detach(), gradients


def assert_exact(case, objective, chunk_size=None):
    loss, gradients = reference(case, objective)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        result, found = fused(case, objective, dtype, chunk_size)
        assert relative_error([result.loss], [loss]) < tolerance
        assert relative_error(found, gradients) < tolerance


@pytest.mark.parametrize("term", TERMS)
def test_each_term_alone_is_exact(term):
    for seed in range(6):
        assert_exact(random_case(seed), Objective(**{term: 1.0}), chunk_size=1 + seed)


mixes = st.fixed_dictionaries(
    {term: st.sampled_from([0.0, 0.1, 1.0, 2.5]) for term in TERMS}
).filter(lambda mix: any(mix.values()))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    rows=st.integers(1, 4),
    length=st.integers(3, 12),
    steps=st.integers(1, 5),
    masked=st.sampled_from([0.0, 0.3, 0.8]),
    chunk_size=st.integers(1, 50),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    eta=st.sampled_from([0.0, 3.0, 10.0]),
    mix=mixes,
)
def test_any_mix_is_exact(seed, rows, length, steps, masked, chunk_size, temperature, eta, mix):
    case = random_case(seed, rows, length, steps, masked=masked)
    assert_exact(case, Objective(temperature=temperature, lk_eta=eta, **mix), chunk_size)


def test_a_large_vocabulary_and_sharp_distributions_are_exact():
    case = random_case(5, rows=2, length=12, vocabulary=700, size=24)
    case.lm_head *= 2.0  # logits of a spread near 10: most probabilities are tiny
    for term in TERMS:
        assert_exact(case, Objective(**{term: 1.0}))


BROKEN = {
    "position weights": lambda case: case.position_weights.__setitem__(1, 0.9),
    "row weights": lambda case: case.row_weights.__setitem__(0, 9.0),
    "mask": lambda case: case.mask.__setitem__((0, 4), ~case.mask[0, 4]),
    "token": lambda case: case.ids.__setitem__((0, 4), (case.ids[0, 4] + 1) % 11),
    "teacher": lambda case: case.hidden[0, 3].neg_(),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_negative_control_the_comparison_sees_what_is_broken(broken):
    objective = Objective(ce=0.5, kl=1.0, tv=1.0)
    case, other = random_case(1, masked=0.0), random_case(1, masked=0.0)
    case.mask[0], other.mask[0] = True, True
    _, expected = reference(case, objective)
    BROKEN[broken](other)
    _, found = fused(other, objective, torch.float64)
    assert relative_error(found, expected) > 1e-2


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (Objective(lk=1.0), Objective(lk=1.0, lk_eta=2.0)),
        (Objective(lk=1.0), Objective(tv=1.0)),
        (Objective(e2e_tv=1.0), Objective(tv=1.0)),
        (Objective(kl=1.0), Objective(kl=1.0, temperature=0.9)),
        (Objective(kl=1.0), Objective(ce=1.0)),
    ],
)
def test_negative_control_terms_differ(right, wrong):
    case = random_case(2)
    _, expected = reference(case, right)
    _, found = fused(case, wrong, torch.float64)
    assert relative_error(found, expected) > 1e-2


@pytest.mark.parametrize("term", TERMS)
def test_bfloat16_stays_within_two_percent(term):
    """Hidden states and lm_head in bfloat16, as a GPU trains; the reference reads the same ones."""
    case = random_case(7, rows=4, length=40, vocabulary=300, size=48)
    for tensor in (*case.outputs, case.hidden, case.lm_head):
        tensor.data.copy_(tensor.data.bfloat16().double())
    objective = Objective(**{term: 1.0})
    loss, gradients = reference(case, objective)
    result, found = fused(case, objective, torch.bfloat16)
    assert result.loss.dtype == torch.float32 and found[0].dtype == torch.bfloat16
    assert relative_error([result.loss], [loss]) < 5e-3
    assert 1e-5 < relative_error(found, gradients) < 2e-2


def test_the_loss_may_be_scaled_afterwards():
    case = random_case(3)
    aligned = align([o.float() for o in case.outputs], case.hidden.float(), case.ids, case.mask, 4)
    result = chunked_loss(aligned, case.lm_head.float(), Objective(lk=1.0), case.position_weights)
    (once,) = torch.autograd.grad(result.loss, case.outputs[:1], retain_graph=True)
    (half,) = torch.autograd.grad(result.loss / 2, case.outputs[:1])
    torch.testing.assert_close(half * 2, once)


@pytest.mark.parametrize("term", ["ce", "kl", "tv", "e2e_tv"])
def test_parts_of_a_step_add_up_to_the_whole(term):
    """With the counts of all rows, losses and gradients of single rows sum to those of the batch.
    (Not LK, whose lambda is of one batch.)"""
    case, objective = random_case(4), Objective(**{term: 1.0})
    whole, gradients = fused(case, objective, torch.float64)
    counts = align(case.outputs, case.hidden, case.ids, case.mask, 4, case.row_weights).counts()
    losses, parts = 0.0, []
    for row in range(len(case.ids)):
        part = dataclasses.replace(
            case, outputs=[o[row : row + 1] for o in case.outputs],
            **{n: getattr(case, n)[row : row + 1] for n in ("hidden", "ids", "mask", "row_weights")}
        )  # fmt: skip
        result, found = fused(part, objective, torch.float64, counts=counts)
        losses += result.loss
        parts.append(found)
    torch.testing.assert_close(losses, whole.loss)
    for k, gradient in enumerate(gradients):
        torch.testing.assert_close(torch.cat([part[k] for part in parts]), gradient)


def test_a_target_outside_the_mask_has_no_gradient():
    case = random_case(0, rows=2)
    case.mask[:] = False
    case.mask[1, 6] = True  # step k predicts it from position 4 - k of row 1
    for objective in (Objective(kl=1.0, ce=0.1), Objective(lk=1.0)):
        _, gradients = fused(case, objective, torch.float32)
        for k, gradient in enumerate(gradients):
            assert gradient.abs().sum(-1).nonzero().tolist() == [[1, 4 - k]]
    # A start's chain ends with it: only step 0 predicts it from a supervised first token.
    _, gradients = fused(case, Objective(e2e_tv=1.0), torch.float32)
    touched = [gradient.abs().sum(-1).nonzero().tolist() for gradient in gradients]
    assert touched == [[[1, 4]], [], [], []]


@pytest.mark.parametrize("term", TERMS)
def test_nothing_supervised_costs_nothing(term):
    case = random_case(0)
    case.mask[:] = False
    result, gradients = fused(case, Objective(**{term: 1.0}), torch.float32)
    assert result.loss == 0 and all(not g.any() for g in gradients)


def test_no_divergence_from_the_teacher_itself_and_some_from_another():
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(5, 7, generator=generator)
    targets = torch.zeros(5, dtype=torch.long)
    for objective in (Objective(kl=1.0), Objective(tv=1.0)):
        for other, distant in ((teacher, False), (teacher.flip(-1), True)):
            values, gradients, agreement = token_terms(
                other[None].clone(), teacher.clone(), targets, objective
            )
            assert (values["immediate"].min() > 1e-2) == distant
            assert (gradients["immediate"].abs().max() > 1e-3) == distant
            assert agreement.all() == (not distant)


def test_agreement_is_the_share_of_equal_best_tokens():
    case = random_case(9)
    result, _ = fused(case, Objective(kl=1.0), torch.float32)
    base = (case.hidden @ case.lm_head.T).argmax(-1)
    for k, output in enumerate(case.outputs):
        drafted = (output @ case.lm_head.T).argmax(-1)
        right, all_ = 0.0, 0.0
        for row, column in case.mask[:, 2 + k :].nonzero().tolist():
            weight = float(case.row_weights[row])
            all_ += weight
            right += weight * bool(drafted[row, column] == base[row, column + k + 1])
        assert result.agreement[k].item() == pytest.approx(right / all_)


def test_per_position_is_the_loss_without_weights():
    case = random_case(6)
    result, _ = fused(case, Objective(kl=1.0), torch.float64)
    assert (result.per_position * case.position_weights).sum() == pytest.approx(result.loss.item())
    end_to_end, _ = fused(case, Objective(e2e_tv=1.0), torch.float64)
    assert end_to_end.per_position.mean() == pytest.approx(end_to_end.loss.item())


SCHEDULE = (
    LossStage(kl=1.0, until=0.3),
    LossStage(lk=1.0, ce=0.1, until=0.6),
    LossStage(e2e_tv=1.0),
)


@pytest.mark.parametrize(
    ("progress", "terms"),
    [
        (0.0, {"kl": 1.0}),
        (0.299, {"kl": 1.0}),
        (0.3, {"lk": 1.0, "ce": 0.1}),
        (0.6, {"e2e_tv": 1.0}),
        (1.0, {"e2e_tv": 1.0}),
    ],
)
def test_schedule_goes_from_stage_to_stage(progress, terms):
    recipe = LossRecipe(schedule=SCHEDULE, temperature=0.6)
    assert objective_at(recipe, progress) == Objective(temperature=0.6, **terms)


def test_without_a_schedule_the_recipe_holds_throughout():
    assert objective_at(LossRecipe(), 0.7) == Objective(kl=1.0, ce=0.1)


def test_position_weights_of_ones_own_stand_as_they_are():
    recipe = LossRecipe(position_weights=(1.0, 0.0, 3.0))
    assert position_weights(recipe, 3).tolist() == [1.0, 0.0, 3.0]


def test_category_weights_default_to_one():
    found = category_weights({"code": 2.0, "chat": 0.0}, ["code", "agent", "chat"])
    assert found.tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize(("affordable", "size"), [(540, 512), (128, 128), (127, 127), (3, 16)])
def test_a_chunk_is_whole_tiles_where_it_can_be(affordable, size):
    assert default_chunk_size(affordable) == size


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_kernels_that_work_the_plain_terms_are_used_and_that_is_said():
    working_kernels.cache_clear()
    with pytest.warns(UserWarning, match="without GPU kernels"):
        assert working_kernels() is None
    assert choose_terms(torch.zeros(3, 2), None) is token_terms
