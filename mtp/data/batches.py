"""Batches by token budget: rows of like length together, padded on the right, never joined.

Rows don't share a sequence, so nothing can be predicted across a document's end. The price is
padding, which grouping by length keeps small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

_POOL_BATCHES = 64  # batches' worth of rows that are sorted by length together


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded rows.

    Args:
        input_ids: [B, T] int64.
        loss_mask: [B, T] bool, False on padding.
        lengths: [B] int64.
        categories: one for each row.
        rows: each row's index in its split.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    lengths: torch.Tensor
    categories: tuple[str, ...]
    rows: tuple[int, ...]

    def without_targets(self) -> Batch:
        """The same rows with nothing supervised."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask))


def row_lengths(dataset: Any) -> np.ndarray:
    """[N] int64, tokens of each row, without reading the tokens."""
    import pyarrow.compute as pc

    column = dataset.select_columns(["input_ids"]).with_format("arrow")[:].column("input_ids")
    return np.asarray(pc.list_value_length(column).to_numpy(), dtype=np.int64)


def plan_batches(lengths: np.ndarray, *, max_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Row indices of each batch. Rows are shuffled, sorted by length in pools, cut, shuffled.

    Args:
        lengths: [N] int64.
        max_tokens: largest number of rows times longest row.
        seed: with `epoch`, decides the order.
        epoch: counts from 0.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    pools = np.cumsum(lengths[order]) // (_POOL_BATCHES * max_tokens)
    order = order[np.lexsort((lengths[order], pools))]
    batches: list[list[int]] = []
    current: list[int] = []
    longest = 0
    for index in order.tolist():
        longest = max(longest, int(lengths[index]))
        if current and (len(current) + 1) * longest > max_tokens:
            batches.append(current)
            current, longest = [], int(lengths[index])
        current.append(index)
    if current:
        batches.append(current)
    return [batches[i] for i in generator.permutation(len(batches))]


def collate(dataset: Any, indices: list[int], *, pad_id: int = 0, min_length: int = 1) -> Batch:
    """The named rows of a split as one batch, padded to at least `min_length` tokens."""
    columns = dataset.with_format("arrow")[indices]
    ids = [torch.tensor(row.values.to_numpy()) for row in columns.column("input_ids")]
    masks = [
        torch.tensor(row.values.to_numpy(zero_copy_only=False))
        for row in columns.column("loss_mask")
    ]
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    width = max(int(lengths.max()), min_length)
    return Batch(
        input_ids=_padded(ids, width, pad_id).long(),
        loss_mask=_padded(masks, width, False).bool(),
        lengths=lengths,
        categories=tuple(columns.column("category").to_pylist()),
        rows=tuple(indices),
    )


def _padded(rows: list[torch.Tensor], width: int, value: float) -> torch.Tensor:
    return torch.stack([F.pad(row, (0, width - len(row)), value=value) for row in rows])
