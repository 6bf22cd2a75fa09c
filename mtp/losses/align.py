"""What predicts each supervised token of a batch.

A target token t is predicted by step k from position t-k-2, while the base's own distribution for
it comes from its hidden state at t-1. All steps are therefore aligned on the target, and the
teacher's logits are computed once a target for all of them.

Shapes: B rows, T tokens, K steps, N supervised targets, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AlignedTargets:
    """Everything that predicts the supervised tokens of a batch, in the order (row, column).

    student: [K, N, H] hidden states of step k at position t-k-2 (zeros where it has none).
    teacher: [N, H] base hidden states at t-1, after the final norm.
    targets: [N] token ids.
    valid: [K, N] whether step k predicts this target.
    weights: [N], of the row that the target lies in.
    rows, columns: [N] where the target lies.
    """

    student: torch.Tensor
    teacher: torch.Tensor
    targets: torch.Tensor
    valid: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    def counts(self) -> torch.Tensor:
        """[K] weighted number of targets of each step; that of step 0 also counts the starts.

        A loop that splits one optimizer step over batches or processes adds these up first and
        gives the sum to `chunked_loss`.
        """
        return (self.valid * self.weights).sum(-1)


def align(
    outputs: list[torch.Tensor],
    base_hidden: torch.Tensor,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    num_steps: int,
    row_weights: torch.Tensor | None = None,
) -> AlignedTargets:
    """Gather what predicts each supervised token.

    Args:
        outputs: the chain's [B, T-1-k, H] tensors; element k at i predicts token i+k+2.
        base_hidden: [B, T, H] after the final norm.
        input_ids: [B, T].
        loss_mask: [B, T] bool; True where the *token itself* is supervised. One row holds one
            document, so a target and what predicts it never lie in two documents.
        num_steps: K; rows too short for the last steps give fewer outputs, which predict nothing.
        row_weights: [B]; 1 when not given.

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
    if row_weights is None:
        row_weights = torch.ones(len(input_ids), device=input_ids.device)
    return AlignedTargets(
        student=torch.stack(students),
        teacher=base_hidden[rows, columns - 1],
        targets=input_ids[rows, columns],
        valid=torch.stack(valid),
        weights=row_weights[rows],
        rows=rows,
        columns=columns,
    )
