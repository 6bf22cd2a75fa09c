"""From all rows to the two splits: groups, held-out side, overlap with it, mix, in that order.

Each step needs to have seen every row, so the rows wait in a file, and here stand only some
numbers of each conversation.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtp.data.decontaminate import HELD_OUT_SHARE, HeldOutRuns
from mtp.data.dedup import BeginningFile, KeyFile
from mtp.data.mix import choose
from mtp.data.report import Kind, PrepareReport
from mtp.data.sources import Item
from mtp.data.split import digest_of, held_out_side
from mtp.data.store import RowWriter
from mtp.data.work import Outcome
from mtp.recipe import MixRecipe

NEAR_DUPLICATES = ("together", "drop", "ignore")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What decides the splits."""

    held_out_percent: int
    seed: int
    near_duplicates: str
    mix: MixRecipe


class Collected:
    """All rows that can be used: the rows in a file, their conversations as numbers."""

    def __init__(self, folder: Path, rules: Rules) -> None:
        self._writer = RowWriter(folder)
        self._keys = KeyFile(folder / "keys.bin")
        self._beginnings = BeginningFile(folder / "beginnings.bin")
        self._rules = rules
        self._kinds: dict[Kind, int] = {}
        # Small numbers: there is one of each for millions of rows.
        self._kind, self._num_rows = array("i"), array("i")
        self._digest = array("Q")
        self._conversation, self._tokens, self._supervised = array("i"), array("i"), array("i")

    def add(self, item: Item, licence: str, outcome: Outcome) -> None:
        """Take the windows of a conversation or document."""
        value: Any = item.value
        kind = Kind(
            place=item.source,
            source=value.source,
            category=value.category,
            licence=licence,
            teacher=value.teacher,
        )
        number = len(self._kind)
        self._kind.append(self._kinds.setdefault(kind, len(self._kinds)))
        self._num_rows.append(item.num_rows)
        self._digest.append(digest_of(value.id, self._rules.seed))
        if outcome.keys is not None:
            self._keys.add(outcome.keys)
        self._beginnings.add(outcome.beginnings)
        for window in outcome.windows:
            self._conversation.append(number)
            self._tokens.append(len(window.input_ids))
            self._supervised.append(int(window.loss_mask.sum()))
            self._writer.add(
                input_ids=window.input_ids,
                loss_mask=window.loss_mask,
                category=value.category,
                conversation_id=value.id,
                source=value.source,
                num_replies=window.num_replies,
                num_replies_with_calls=window.num_replies_with_calls,
            )

    def deal(self, report: PrepareReport) -> dict[str, np.ndarray]:
        """How often each row is in each split, [N] int64; the report is told."""
        rules = self._rules
        digests = _numbers(self._digest)
        kinds = _numbers(self._kind)
        conversation = _numbers(self._conversation)
        count = len(kinds)
        tokens = np.bincount(conversation, weights=_numbers(self._tokens), minlength=count).astype(
            np.int64
        )
        kept = tokens > 0
        contained = self._beginnings.contained() & kept
        self._drop(contained, "beginning of a longer conversation", report)
        kept &= ~contained
        groups = np.arange(count)
        if rules.near_duplicates != "ignore":
            groups = self._keys.groups()
            self._report_groups(groups, report)
        if rules.near_duplicates == "drop":
            first = np.full(count, count)
            np.minimum.at(first, groups[kept], np.flatnonzero(kept))
            later = kept & (first[groups] != np.arange(count))
            self._drop(later, "near-duplicate", report)
            kept &= ~later
        held_out = held_out_side(digests, groups, percent=rules.held_out_percent)
        overlapping = self._overlapping(kept, held_out, report)
        self._drop(overlapping, "repeats held-out text", report)
        train = kept & ~held_out & ~overlapping
        copies = train.astype(np.int64)
        if (rules.mix.weights or rules.mix.tokens) and train.any():
            copies, report.mix = choose(
                [kind.names for kind in self._kinds], kinds, tokens * train, digests, rules.mix
            )
            self._drop(train & (copies == 0), "not in the mix", report)
        dealt = {"train": copies, "held_out": (kept & held_out).astype(np.int64)}
        for split, times in dealt.items():
            self._count(split, times, report)
        return {split: times[conversation] for split, times in dealt.items()}

    def save(self, out: Path, copies: dict[str, np.ndarray]) -> None:
        """Write the splits."""
        self._keys.close()
        self._beginnings.close()
        self._writer.save(out, copies)

    def close(self) -> None:
        """Close the files; safe to call twice."""
        self._keys.close()
        self._beginnings.close()
        self._writer.close()

    def _overlapping(
        self, kept: np.ndarray, held_out: np.ndarray, report: PrepareReport
    ) -> np.ndarray:
        """[C] bool: conversations to train on that mostly repeat supervised held-out tokens."""
        conversation = _numbers(self._conversation)
        of_rows = (kept & held_out)[conversation]
        supervised = _numbers(self._supervised)
        runs = HeldOutRuns(int(supervised[of_rows].sum()))
        total, found = np.zeros((2, len(kept)), dtype=np.int64)
        if not of_rows.any() or self._rules.near_duplicates == "ignore":
            return np.zeros(len(kept), dtype=bool)
        for first, batch in self._writer.batches():
            runs.add(batch, of_rows[first : first + batch.num_rows])
        runs.finish()
        for first, batch in self._writer.batches():
            of_row, held = runs.count(batch)
            numbers = conversation[first : first + batch.num_rows]
            np.add.at(total, numbers, of_row)
            np.add.at(found, numbers, held)
        training = kept & ~held_out
        report.held_out_overlap = float(found[training].sum() / max(total[training].sum(), 1))
        return training & (total > 0) & (found >= HELD_OUT_SHARE * total)

    def _report_groups(self, groups: np.ndarray, report: PrepareReport) -> None:
        sizes = np.bincount(groups, minlength=1)
        report.near_duplicates = int(sizes[sizes > 1].sum())
        report.near_duplicate_groups = int((sizes > 1).sum())
        report.largest_group = int(sizes.max(initial=0))

    def _drop(self, which: np.ndarray, reason: str, report: PrepareReport) -> None:
        kinds: Sequence[Kind] = list(self._kinds)
        dropped: Counter[int] = Counter()
        for number in np.flatnonzero(which):
            dropped[self._kind[number]] += self._num_rows[number]
        for kind, num_rows in dropped.items():
            report.by_source[kinds[kind].place].dropped[reason] += num_rows

    def _count(self, split: str, times: np.ndarray, report: PrepareReport) -> None:
        conversation = _numbers(self._conversation)
        kind_of = _numbers(self._kind)
        weights = times[conversation]
        tokens = _numbers(self._tokens) * weights
        supervised = _numbers(self._supervised) * weights
        for number, kind in enumerate(self._kinds):
            rows = (kind_of == number)[conversation]
            report.add_rows(
                split,
                kind,
                conversations=int(((kind_of == number) & (times > 0)).sum()),
                rows=int(weights[rows].sum()),
                tokens=int(tokens[rows].sum()),
                supervised_tokens=int(supervised[rows].sum()),
            )


def _numbers(values: array[int]) -> np.ndarray:
    """The same memory as numpy sees it."""
    return np.frombuffer(values, dtype=values.typecode)
