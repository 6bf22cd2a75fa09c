"""The tokens that a draft can say: the most frequent supervised ones of the training rows.

A smaller output matrix makes drafting cheaper. What is left out can never be drafted; losses and
acceptance here count that lost mass (`mtp.dspark.loss`), the public trainer's do not.

Shapes: V the base's vocabulary, D the draft's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """kept: [D] int64, the base's ids in rising order; vocab_size: V."""

    kept: torch.Tensor
    vocab_size: int

    @property
    def t2d(self) -> torch.Tensor:
        """[V] bool, True for tokens that can be drafted."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.kept] = True
        return mask

    @property
    def d2t(self) -> torch.Tensor:
        """[D] int64 to add to a draft id: the base's id is `id + d2t[id]`."""
        return self.kept - torch.arange(len(self.kept))

    @property
    def draft_ids(self) -> torch.Tensor:
        """[V] int64: the draft's id of each of the base's tokens, -1 where it has none."""
        ids = torch.full((self.vocab_size,), -1)
        ids[self.kept] = torch.arange(len(self.kept))
        return ids

    @classmethod
    def from_offsets(cls, d2t: torch.Tensor, vocab_size: int) -> DraftVocabulary:
        """The vocabulary that a saved `d2t` describes."""
        return cls(kept=d2t + torch.arange(len(d2t)), vocab_size=vocab_size)


def choose_vocabulary(counts: np.ndarray, size: int) -> DraftVocabulary:
    """The `size` most frequent tokens; among equals the lower ids, so unseen ones come last.

    Args:
        counts: [V] int64.
        size: D, at most V.
    """
    order = np.argsort(-counts, kind="stable")[:size]
    return DraftVocabulary(kept=torch.from_numpy(np.sort(order)), vocab_size=len(counts))


def supervised_counts(rows: Any, vocab_size: int) -> np.ndarray:
    """[V] int64: how often each token is a target in the rows of a prepared split."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    columns = rows.select_columns(["input_ids", "loss_mask"]).with_format("arrow")
    for start in range(0, len(columns), _ROWS_AT_ONCE):
        table = columns[start : start + _ROWS_AT_ONCE]
        ids = table.column("input_ids").combine_chunks().flatten().to_numpy()
        mask = table.column("loss_mask").combine_chunks().flatten().to_numpy(zero_copy_only=False)
        counts += np.bincount(ids[mask], minlength=vocab_size)
    return counts
