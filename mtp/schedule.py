"""What each optimizer step trains on and at which learning rate: functions of the step's number.

An *optimizer step* takes `tokens_per_batch` tokens, whatever computes it: one process in one go,
one that accumulates micro-batches, or eight processes. Batches and learning rate depend on the
step's number and the recipe alone, so a resumed run needs to know nothing but that number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from graft.errors import UserError
from mtp.data.batches import Batch, collate, plan_batches, row_lengths
from mtp.recipe import TrainRecipe


def learning_rate_factor(settings: TrainRecipe, step: int) -> float:
    """Factor of the learning rate at an optimizer step: linear warm-up, then cosine."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    remaining = max(settings.steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / remaining, 1.0)
    floor = settings.min_learning_rate / settings.learning_rate
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


class StepBatches:
    """The micro-batches of every optimizer step, shared out among processes.

    Args:
        rows: the training split of a prepared folder.
        settings: tokens_per_batch, micro_batch_tokens and seed are used.
        num_processes: how many share a step; process r takes micro-batches r, r + n, r + 2n, ...
        process: the number of this one.
        min_length: micro-batches are padded to at least so many tokens a row, so that every layer
            of a short row's chain runs.

    Raises:
        UserError: no rows, one that is longer than a budget, or all too short for the last layer.
    """

    def __init__(
        self,
        rows: Any,
        settings: TrainRecipe,
        *,
        num_processes: int = 1,
        process: int = 0,
        min_length: int = 1,
    ) -> None:
        self._rows, self._settings, self._min_length = rows, settings, min_length
        self._num_processes, self._process = num_processes, process
        self._true_lengths = row_lengths(rows)
        self._lengths = np.maximum(self._true_lengths, min_length)
        self._epoch, self._first_step = 0, 0
        if not len(self._lengths):
            raise UserError("training rows", "none", "prepare more data")
        if self._true_lengths.max() < min_length:
            raise UserError(
                f"a training row of at least {min_length} tokens, which the last speculative step "
                "needs to learn anything",
                f"none longer than {self._true_lengths.max()}",
                "train fewer layers, or prepare longer rows",
            )
        for key in ("tokens_per_batch", "micro_batch_tokens"):
            budget = getattr(settings, key)
            if budget and budget < self._lengths.max():
                raise UserError(
                    f"{key} of at least the longest row",
                    f"{budget}, with a row of {self._lengths.max()} tokens",
                    "raise it, or prepare the data with a smaller --max-length",
                )
        self._plan = self._planned(0)

    def row_indices(self, step: int) -> list[list[int]]:
        """Row indices of each micro-batch of an optimizer step, those of all processes."""
        if step < self._first_step:
            self._epoch, self._first_step, self._plan = 0, 0, self._planned(0)
        while step >= self._first_step + len(self._plan):
            self._first_step += len(self._plan)
            self._epoch += 1
            self._plan = self._planned(self._epoch)
        rows = self._plan[step - self._first_step]
        lengths = self._lengths[rows]
        budget = self._settings.micro_batch_tokens or _smallest_budget(lengths, self._num_processes)
        return [[rows[i] for i in part] for part in cut(lengths, budget)]

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """This process's micro-batches of an optimizer step.

        Every process gets equally many, because gradients and shards are exchanged in step: where
        one has none left, it repeats its step's first with nothing supervised.
        """
        parts = self.row_indices(step)
        rounds = -(-len(parts) // self._num_processes)
        for number in range(self._process, rounds * self._num_processes, self._num_processes):
            spare = number >= len(parts)
            batch = collate(self._rows, parts[0 if spare else number], min_length=self._min_length)
            yield batch.without_targets() if spare else batch

    def num_tokens(self, step: int) -> int:
        """Tokens of an optimizer step, in all processes, without padding."""
        return sum(int(self._true_lengths[part].sum()) for part in self.row_indices(step))

    def _planned(self, epoch: int) -> list[list[int]]:
        return plan_batches(
            self._lengths,
            max_tokens=self._settings.tokens_per_batch,
            seed=self._settings.seed,
            epoch=epoch,
        )


def cut(lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Cut rows into consecutive parts of at most `budget` tokens, padding included.

    Args:
        lengths: [N] int64, none above `budget`.
        budget: largest number of rows times longest row.
    """
    parts: list[list[int]] = []
    current: list[int] = []
    longest = 0
    for index, length in enumerate(lengths.tolist()):
        if current and (len(current) + 1) * max(longest, length) > budget:
            parts.append(current)
            current, longest = [], 0
        current.append(index)
        longest = max(longest, length)
    return [*parts, current]


def _smallest_budget(lengths: np.ndarray, num_parts: int) -> int:
    """The smallest budget at which `cut` gives at most `num_parts` parts."""
    low, high = int(lengths.max()), int(lengths.max()) * len(lengths)
    if num_parts == 1:
        return high
    while low < high:
        middle = (low + high) // 2
        if len(cut(lengths, middle)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low
