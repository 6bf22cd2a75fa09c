"""Where blocks start, and which of their slots are supervised.

A served block starts at a token that the model itself just said, so an anchor is a supervised token
with a supervised one after it. Slot k predicts the token at p+k+1 and has that token's mask (the
public trainer takes the anchor side's, p+k: the first token of a reply is never a target there, and
what follows a reply is). Once a block has left the reply the request has ended, so no later slot
counts. The last B positions of each document start no block: a row is one document, so no block
looks past its end (there, only the end of a packed row is cleared).

Which anchors a row gets depends on the step's seed and the row's number alone, not on what it is
batched with: a resumed run draws the same ones, however many processes share a step.

Shapes: R rows, T tokens, N blocks a row, B slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of a batch, on the CPU.

    anchors: [R, N] int64, rising in each row; rows with fewer blocks repeat their last one.
    live: [R, N, B] bool, whether a slot is supervised; False in repeated blocks.
    """

    anchors: torch.Tensor
    live: torch.Tensor


def possible_anchors(
    loss_mask: torch.Tensor, lengths: torch.Tensor, block_size: int
) -> torch.Tensor:
    """[R, T] bool: where a block may start, of loss_mask [R, T] and lengths [R]."""
    possible = loss_mask.clone()
    possible[:, :-1] &= loss_mask[:, 1:]
    positions = torch.arange(loss_mask.shape[1])
    return possible & (positions < (lengths - block_size).unsqueeze(1))


def require_blocks(rows: Any, block_size: int) -> None:
    """Refuse a prepared split in which no block can start: nothing would be learned.

    Raises:
        UserError: no such row.
    """
    for mask in rows.select_columns(["loss_mask"]).with_format("torch"):
        one = mask["loss_mask"].bool()[None]
        if possible_anchors(one, torch.tensor([one.shape[1]]), block_size).any():
            return
    raise UserError(
        f"a training row with two supervised tokens side by side, {block_size} after the first",
        f"none in {len(rows)} rows",
        "prepare longer rows, or lower dspark.block_size",
    )


def choose_blocks(
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
    rows: Sequence[int],
    *,
    block_size: int,
    max_anchors: int,
    seed: int,
) -> Blocks:
    """Blocks for every row of a batch.

    Args:
        loss_mask: [R, T] bool, True where the token itself is supervised.
        lengths: [R].
        rows: each row's number in its split.
        block_size: B.
        max_anchors: blocks of a row, drawn when it has more; 0 takes all.
        seed: of the draw.
    """
    possible = possible_anchors(loss_mask, lengths, block_size)
    chosen = [
        _drawn(mask.nonzero()[:, 0], max_anchors, seed, row)
        for mask, row in zip(possible, rows, strict=True)
    ]
    num_blocks = max(1, *map(len, chosen))
    anchors = torch.zeros(len(chosen), num_blocks, dtype=torch.int64)
    for target, positions in zip(anchors, chosen, strict=True):
        if len(positions):
            target[: len(positions)] = positions
            target[len(positions) :] = positions[-1]
    real = torch.arange(num_blocks) < torch.tensor([len(p) for p in chosen]).unsqueeze(1)
    return Blocks(anchors=anchors, live=slot_mask(loss_mask, anchors, block_size) & real[..., None])


def slot_mask(loss_mask: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """[R, N, B] bool: whether token p+k+1 is supervised, and all of the block's before it."""
    num_rows, num_blocks = anchors.shape
    targets = anchors[..., None] + torch.arange(1, block_size + 1)
    inside = targets < loss_mask.shape[1]
    flat = targets.clamp(max=loss_mask.shape[1] - 1).flatten(1)
    mask = loss_mask.gather(1, flat).view(num_rows, num_blocks, block_size)
    return (mask & inside).cumprod(-1).bool()


def _drawn(positions: torch.Tensor, max_anchors: int, seed: int, row: int) -> torch.Tensor:
    if not max_anchors or len(positions) <= max_anchors:
        return positions
    generator = torch.Generator().manual_seed((seed * 1_000_003 + row) % 2**63)
    picked = torch.randperm(len(positions), generator=generator)[:max_anchors]
    return positions[picked].sort().values
