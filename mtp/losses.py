"""Distillation losses, chunked so that no [tokens, vocabulary] matrix outlives its chunk.

A target token t is predicted by step k from position t-k-2, while the base's own distribution for
it comes from its hidden state at t-1. All steps are therefore aligned on the target, and the
teacher's logits are computed once a target for all of them.

Shapes: K steps, N supervised targets, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Weights of the terms; the teacher is the base at the same target.

    kl: KL(teacher || head), Hinton et al. 2015 (arXiv 1503.02531) at temperature 1.
    ce: cross-entropy against the token in the data.
    """

    kl: float = 1.0
    ce: float = 0.1

    def loss_and_gradient(
        self, logits: torch.Tensor, teacher_logits: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of each token, and its gradient by the logits, written out: with q the head's and
        p the base's distribution, d KL = q - p and d CE = q - onehot(target).

        Args:
            logits: [K, N, V].
            teacher_logits: [N, V].
            targets: [N].

        Returns:
            [K, N] and [K, N, V], both float32.
        """
        log_q = F.log_softmax(logits.float(), dim=-1)
        index = targets.expand(log_q.shape[:-1]).unsqueeze(-1)
        loss = -self.ce * log_q.gather(-1, index).squeeze(-1)
        if self.kl:
            log_p = F.log_softmax(teacher_logits.float(), dim=-1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1)
            loss -= self.kl * (entropy + torch.einsum("nv,knv->kn", p, log_q))
        gradient = log_q.exp_().mul_(self.kl + self.ce)
        if self.kl:
            gradient -= self.kl * p
        gradient.scatter_add_(-1, index, torch.full_like(index, -self.ce, dtype=gradient.dtype))
        return loss, gradient


@dataclass(frozen=True)
class AlignedTargets:
    """Everything that predicts the supervised tokens of a batch, aligned on the target.

    student: [K, N, H] hidden states of step k at position t-k-2 (zeros where it has none).
    teacher: [N, H] base hidden states at t-1, after the final norm.
    targets: [N] token ids.
    valid: [K, N] whether step k predicts this target.
    """

    student: torch.Tensor
    teacher: torch.Tensor
    targets: torch.Tensor
    valid: torch.Tensor


def align(
    outputs: list[torch.Tensor],
    base_hidden: torch.Tensor,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    num_steps: int,
) -> AlignedTargets:
    """Gather what predicts each supervised token.

    Args:
        outputs: the chain's [B, T-1-k, H] tensors; element k at i predicts token i+k+2.
        base_hidden: [B, T, H] after the final norm.
        input_ids: [B, T].
        loss_mask: [B, T] bool; True where the *token itself* is supervised. One row holds one
            document, so a target and what predicts it never lie in two documents.
        num_steps: K; rows too short for the last steps give fewer outputs, which predict nothing.

    Returns:
        AlignedTargets over the supervised tokens with t >= 2 (t-1 and t-2 exist).
    """
    supervised = loss_mask.clone()
    supervised[:, :2] = False
    rows, columns = supervised.nonzero(as_tuple=True)
    students, valid = [], []
    nothing = base_hidden.new_zeros(base_hidden.shape[0], 1, base_hidden.shape[2])
    for k in range(num_steps):
        output = outputs[k] if k < len(outputs) else nothing
        source = columns - k - 2
        valid.append((source >= 0) & (k < len(outputs)))
        source = source.clamp(max=output.shape[1] - 1)
        picked = output[rows, source.clamp(min=0)]
        students.append(torch.where(valid[-1].unsqueeze(-1), picked, torch.zeros_like(picked)))
    return AlignedTargets(
        student=torch.stack(students),
        teacher=base_hidden[rows, columns - 1],
        targets=input_ids[rows, columns],
        valid=torch.stack(valid),
    )


class _ChunkedLoss(torch.autograd.Function):
    """Loss and its gradient in one pass over chunks of targets; `lm_head` is frozen."""

    @staticmethod
    def forward(ctx, student, aligned, weights, lm_head, objective, chunk_size):  # type: ignore
        gradient = torch.empty_like(student)
        totals = torch.zeros(student.shape[0], device=student.device)
        for start in range(0, student.shape[1], chunk_size):
            chunk = slice(start, start + chunk_size)
            loss, by_logits = objective.loss_and_gradient(
                F.linear(student[:, chunk], lm_head),
                F.linear(aligned.teacher[chunk], lm_head),
                aligned.targets[chunk],
            )
            # A step without this target has weight 0.
            totals += (loss * weights[:, chunk]).sum(-1)
            by_logits *= weights[:, chunk].unsqueeze(-1)
            gradient[:, chunk] = by_logits.to(lm_head.dtype) @ lm_head
        ctx.save_for_backward(gradient)
        return totals

    @staticmethod
    def backward(ctx, grad_totals):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_totals.view(-1, 1, 1), None, None, None, None, None


def chunked_loss(
    aligned: AlignedTargets,
    lm_head: torch.Tensor,
    objective: Objective,
    position_weights: torch.Tensor,
    *,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Weighted loss of each step: [K]; its sum is the training loss.

    Each step's loss is the mean over the targets that it predicts, times its position weight.

    Args:
        aligned: from `align`.
        lm_head: [V, H], frozen.
        objective: the terms.
        position_weights: [K].
        chunk_size: targets a chunk; memory is about 3 * chunk_size * V * K floats. By default 2048
            on a GPU, and on a CPU as many as its caches hold.
    """
    chunk_size = chunk_size or (2048 if lm_head.is_cuda else 64)
    counts = aligned.valid.sum(-1).clamp(min=1)
    weights = aligned.valid * (position_weights / counts).unsqueeze(-1)
    return _ChunkedLoss.apply(aligned.student, aligned, weights, lm_head, objective, chunk_size)  # type: ignore[no-any-return]
