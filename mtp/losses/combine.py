"""From divergences of single tokens to the loss: weights, LK's mix, end-to-end TV.

All on [K, N] numbers, in ordinary differentiable code: autograd gives the factors by which the
kept gradients are scaled.

Shapes: K steps, N targets.
"""

from __future__ import annotations

import torch

from mtp.losses.align import AlignedTargets
from mtp.losses.terms import Objective


def combine(
    values: dict[str, torch.Tensor],
    aligned: AlignedTargets,
    objective: Objective,
    position_weights: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the unweighted loss of each position.

    Each step's loss is the weighted mean over the targets that it predicts, times its position
    weight; end-to-end TV is the weighted mean over starts and has no position weights: a late
    position counts as much as the ones before it let it.

    Args:
        values: from `token_terms`, all chunks together, [K, N] each.
        aligned: validity, weights and places of the targets.
        objective: weights of the terms.
        position_weights: [K].
        counts: [K] from `AlignedTargets.counts`, of all that the mean is taken over.

    Returns:
        A scalar and [K]; both differentiable by `values`.
    """
    counts = torch.where(counts > 0, counts, torch.ones_like(counts))
    token_weights = aligned.valid * aligned.weights / counts.unsqueeze(-1)
    per_position = torch.zeros_like(position_weights)
    if "immediate" in values:
        per_position = per_position + (values["immediate"] * token_weights).sum(-1)
    if objective.lk:
        mix = lk_mix(values["tv"], aligned, objective.lk_eta).unsqueeze(-1)
        tokens = mix * values["kl"] + (1 - mix) * values["tv"]
        per_position = per_position + objective.lk * (tokens * token_weights).sum(-1)
    loss = (per_position * position_weights).sum()
    if objective.e2e_tv:
        end_to_end = objective.e2e_tv * end_to_end_tv(values["tv"], aligned, counts[0])
        loss = loss + end_to_end.mean()
        per_position = per_position + end_to_end
    return loss, per_position


def lk_mix(tv: torch.Tensor, aligned: AlignedTargets, eta: float) -> torch.Tensor:
    """LK's lambda = exp(-eta alpha), [K]: alpha is the mean acceptance of one position over this
    batch, and constant to the gradient (arXiv 2602.23881, 4.2 and 4.4: one lambda a draft depth).
    So KL leads while a position is poor, TV once it is good.
    """
    weights = aligned.valid * aligned.weights
    total = weights.sum(-1)
    mean_tv = (tv.detach() * weights).sum(-1) / torch.where(total > 0, total, 1)
    return torch.exp(-eta * (1 - mean_tv))


def end_to_end_tv(
    tv: torch.Tensor, aligned: AlignedTargets, num_starts: torch.Tensor
) -> torch.Tensor:
    """Mean over starts of 1 - prod_{j<=k} (1 - TV_j) for each position: [K].

    A start p drafts the tokens p+2 ... p+K+1. Its chain ends where the next token is not
    supervised or does not exist; positions past the end add nothing, and a start whose first token
    is not supervised is none.
    """
    num_steps, num_targets = tv.shape
    offsets = torch.arange(num_steps, device=tv.device).unsqueeze(-1)
    first = torch.arange(num_targets, device=tv.device)
    # Targets are sorted: step k of the start whose first target is n predicts target n+k, if the
    # columns between are all there.
    index = first + offsets
    inside = index < num_targets
    index = index.clamp(max=max(num_targets - 1, 0))
    chained = (
        inside
        & (aligned.rows[index] == aligned.rows)
        & (aligned.columns[index] == aligned.columns + offsets)
        & aligned.valid.gather(1, index)
    )
    accepted = torch.where(chained, 1 - tv.gather(1, index), torch.zeros_like(tv))
    rejected = 1 - accepted.cumprod(dim=0)
    return (rejected * (chained * aligned.weights)).sum(-1) / num_starts
