"""The loss and its gradient in one pass over chunks of targets.

`lm_head` is frozen, so the gradient by the hidden states is known as soon as a chunk's logits are:
no [N, V] matrix outlives its chunk. What is kept is [K, N, H] for each group of terms, in the type
of the hidden states; the package's docstring says why.

Precision: float32 arithmetic on float32 inputs equals a float64 reference to 1e-5 relative, loss
and gradient. With bfloat16 hidden states and lm_head, softmax and divergences are float32, but the
gradient by the logits is rounded to bfloat16 before it meets lm_head, and on a CPU the logits are
too (a GPU writes them in float32): 2 % relative in norm, tested.

Shapes: K steps, N targets, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from mtp.losses.align import AlignedTargets
from mtp.losses.combine import combine
from mtp.losses.project import project
from mtp.losses.restricted import kept_tokens
from mtp.losses.terms import Objective, token_terms
from mtp.recipe import RestrictedVocabulary

# Floats of one [K, chunk, V] matrix. On a CPU, what its caches hold. On a GPU, the product that
# takes gradients back to hidden states has K * chunk rows and few columns: it needs about 2048 rows
# to fill the chip; alive at once are the logits and, in the type of lm_head, the gradients.
CHUNK_FLOATS = {"cpu": 2**20, "cuda": 2**29}
CHUNK_MULTIPLE = 128  # matrix products are tiled
USE_KERNELS = True  # on a GPU, where Triton is installed; False to compare


@dataclass(frozen=True)
class FusedLoss:
    """What a pass gives.

    loss: scalar, differentiable by the aligned hidden states.
    per_position: [K], without position weights.
    agreement: [K], share of targets whose most probable token is the base's: the chance that a
        greedy draft is accepted there, given that all before it were.
    """

    loss: torch.Tensor
    per_position: torch.Tensor
    agreement: torch.Tensor


def chunked_loss(
    aligned: AlignedTargets,
    lm_head: torch.Tensor,
    objective: Objective,
    position_weights: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    restricted: RestrictedVocabulary | None = None,
    chunk_size: int | None = None,
) -> FusedLoss:
    """The training loss of aligned targets.

    Args:
        aligned: from `align`.
        lm_head: [V, H], frozen.
        objective: the terms.
        position_weights: [K].
        counts: [K], what the means are over, when this batch is a part of a step.
        restricted: which part of the vocabulary is looked at; None, or a top_p of 0, is all of it.
        chunk_size: targets a chunk; by default as many as `CHUNK_FLOATS` allows.
    """
    per_target = aligned.student.shape[0] * lm_head.shape[0]
    budget = CHUNK_FLOATS.get(lm_head.device.type, CHUNK_FLOATS["cuda"])
    chunk_size = chunk_size or default_chunk_size(budget // per_target)
    counts = aligned.counts() if counts is None else counts
    return FusedLoss(
        *_FusedLoss.apply(  # type: ignore[no-untyped-call]
            aligned.student,
            aligned,
            position_weights,
            counts,
            lm_head,
            objective,
            restricted if restricted and restricted.top_p else None,
            chunk_size,
        )
    )


def default_chunk_size(affordable: int) -> int:
    """Targets a chunk, of which so many are affordable: whole tiles, if there is more than one."""
    whole_tiles = affordable - affordable % CHUNK_MULTIPLE
    return max(whole_tiles or affordable, 16)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, student, aligned, position_weights, counts, lm_head, objective, restricted, chunk_size
    ):
        values, gradients, agreement = _all_chunks(
            student, aligned, lm_head, objective, restricted, chunk_size
        )
        with torch.enable_grad():
            for value in values.values():
                value.requires_grad_()
            position_weights = position_weights.to(agreement.device, agreement.dtype)
            loss, per_position = combine(values, aligned, objective, position_weights, counts)
            factors = torch.autograd.grad(loss, list(values.values()))
        total = torch.zeros_like(student)
        for name, factor in zip(values, factors, strict=True):
            factor = (factor / objective.temperature).to(student.dtype)
            total += gradients.pop(name).mul_(factor.unsqueeze(-1))
        ctx.save_for_backward(total)
        weights = aligned.valid * aligned.weights
        share = (agreement * weights).sum(-1) / weights.sum(-1).clamp(min=1e-30)
        per_position = per_position.detach()
        ctx.mark_non_differentiable(per_position, share)
        return loss.detach(), per_position, share

    @staticmethod
    def backward(ctx, by_loss, *_):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return gradient * by_loss.to(gradient.dtype), *[None] * 7


def _all_chunks(
    student: torch.Tensor,
    aligned: AlignedTargets,
    lm_head: torch.Tensor,
    objective: Objective,
    restricted: RestrictedVocabulary | None,
    chunk_size: int,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Values [K, N] of each group of terms, their gradients by `student` [K, N, H], and [K, N]
    agreement."""
    names = [*objective.deferred, *(["immediate"] if objective.immediate else [])]
    dtype = torch.promote_types(lm_head.dtype, torch.float32)
    shape, device = student.shape[:2], student.device
    values = {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}
    gradients = {name: torch.empty_like(student) for name in names}
    agreement = torch.zeros(shape, dtype=dtype, device=device)
    terms = choose_terms(lm_head, restricted)
    for start in range(0, shape[1], chunk_size):
        chunk = slice(start, start + chunk_size)
        matrix, targets = lm_head, aligned.targets[chunk]
        teacher_logits = project(aligned.teacher[chunk], lm_head)
        if restricted is not None:
            kept = kept_tokens(student[:, chunk], teacher_logits, targets, lm_head, restricted)
            matrix, targets = lm_head[kept], torch.searchsorted(kept, targets)
            teacher_logits = teacher_logits[:, kept]
        found, by_logits, agreement[:, chunk] = terms(
            project(student[:, chunk], matrix), teacher_logits, targets, objective
        )
        for name in names:
            values[name][:, chunk] = found[name]
            gradients[name][:, chunk] = by_logits.pop(name).to(lm_head.dtype) @ matrix
    return values, gradients, agreement


def choose_terms(
    lm_head: torch.Tensor, restricted: RestrictedVocabulary | None
) -> Callable[..., tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]]:
    """`token_terms`, or on a GPU its kernels, which are compiled for one size of vocabulary."""
    if lm_head.is_cuda and lm_head.dtype != torch.float64 and restricted is None:
        kernels = working_kernels() if USE_KERNELS else None
        if kernels is not None:
            return functools.partial(kernels.token_terms, gradient_dtype=lm_head.dtype)
    return token_terms


@functools.cache
def working_kernels() -> ModuleType | None:
    """The kernels, if they compile here: Triton must be installed and find a C compiler."""
    try:
        from mtp.losses import kernels

        kernels.log_sums(torch.zeros(1, 16, device="cuda"))
    except Exception as error:  # whatever a compiler may raise
        warnings.warn(f"the losses run slower, without GPU kernels: {error}", stacklevel=2)
        return None
    return kernels
