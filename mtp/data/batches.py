"""Batches by token budget: rows of like length together, padded on the right, never joined.

Rows don't share a sequence, so nothing can be predicted across a document's end. The price is
padding, which grouping by length keeps small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graft.errors import UserError

_POOL_BATCHES = 64  # batches' worth of rows that are sorted by length together


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded rows.

    Args:
        input_ids: [B, T] int64.
        loss_mask: [B, T] bool, False on padding.
        lengths: [B] int64.
        categories: one for each row.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    lengths: torch.Tensor
    categories: tuple[str, ...]


def token_budget_batches(
    dataset: Any, *, max_tokens: int, seed: int, epoch: int, pad_id: int
) -> Iterator[Batch]:
    """Every row exactly once, in an order that depends on the data, `seed` and `epoch` only.

    Args:
        dataset: one split of a prepared folder.
        max_tokens: largest B * T of a batch, padding included.
        seed: with `epoch`, decides the order.
        epoch: counts from 0.
        pad_id: token id for padding; any valid one.

    Raises:
        UserError: a row is longer than `max_tokens`.
    """
    lengths = row_lengths(dataset)
    if len(lengths) and lengths.max() > max_tokens:
        raise UserError(
            "a token budget of at least the longest row",
            f"{max_tokens}, with a row of {lengths.max()} tokens",
            "raise the budget, or prepare the data with a smaller --max-length",
        )
    rows = dataset.with_format("arrow")
    for indices in plan_batches(lengths, max_tokens=max_tokens, seed=seed, epoch=epoch):
        yield _collate(rows[indices], pad_id)


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


def _collate(columns: Any, pad_id: int) -> Batch:
    ids = [torch.tensor(row.values.to_numpy()) for row in columns.column("input_ids")]
    masks = [
        torch.tensor(row.values.to_numpy(zero_copy_only=False))
        for row in columns.column("loss_mask")
    ]
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(
        input_ids=pad(ids, batch_first=True, padding_value=pad_id).long(),
        loss_mask=pad(masks, batch_first=True, padding_value=False).bool(),
        lengths=lengths,
        categories=tuple(columns.column("category").to_pylist()),
    )
