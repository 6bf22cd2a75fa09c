"""Rows that hold text of an evaluation set, found by runs of 13 words.

The length is GPT-3's (Brown et al. 2020, appendix C); as there, one common run is enough, and
items shorter than 13 words are compared whole, from 8 words on. A run that more than 2 items of
one file share is their instruction, not their content, and is not looked for. The files are the
user's: nothing is shipped or fetched.

The other direction, training rows that repeat held-out ones, is measured in tokens over what is
supervised (`HeldOutRuns`), since agents and code share many short runs: a conversation is left
out when 70% of its runs are held out (the share at which PaLM calls an example contaminated,
Chowdhery et al. 2022, section 8).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graft.errors import UserError
from mtp.data.conversation import Conversation, Document, printable
from mtp.data.ngrams import mixed, ngram_hashes, texts_of, word_hashes
from mtp.data.sources import Reading, read_source

RUN, SHORTEST, MAX_SHARING = 13, 8, 2
HELD_OUT_SHARE = 0.7
_MAX_HELD_OUT_RUNS = 1 << 21


@dataclass(kw_only=True)
class EvaluationSets:
    """Runs of words of evaluation files.

    Args:
        runs: by length in words, sorted uint64 hashes.
        owners: for each run of `runs`, the number of its item.
        items: names, `FILE:LINE`.
        num_items: items of each file.
        num_too_short: items of each file that have fewer than 8 words in every text.
    """

    runs: dict[int, np.ndarray] = field(default_factory=dict)
    owners: dict[int, np.ndarray] = field(default_factory=dict)
    items: list[tuple[str, int]] = field(default_factory=list)
    num_items: Counter[str] = field(default_factory=Counter)
    num_too_short: Counter[str] = field(default_factory=Counter)

    def match(self, item: Conversation | Document) -> tuple[str, int] | None:
        """(file, line) of the first evaluation item that a row has a run of, if any."""
        for text in texts_of(item) if self.runs else ():
            words = word_hashes(text)
            for length, runs in self.runs.items():
                found = ngram_hashes(words, length)
                places = np.searchsorted(runs, found)
                hits = runs[np.minimum(places, len(runs) - 1)] == found
                if hits.any():
                    return self.items[int(self.owners[length][places[np.argmax(hits)]])]
        return None


def read_evaluation_sets(files: Sequence[str | Path]) -> EvaluationSets:
    """Read files of prompts, conversations, code, or of rows of any other shape.

    Raises:
        UserError: a file cannot be read, or holds no text that is long enough.
    """
    sets = EvaluationSets()
    found: dict[int, list[tuple[int, int]]] = {}
    for path in map(str, files):
        sharing: dict[int, Counter[int]] = {}
        file = printable(path)
        for texts, line in _evaluation_items(path):
            number = len(sets.items)
            sets.items.append((file, line))
            sets.num_items[file] += 1
            by_length = _runs_of(texts)
            sets.num_too_short[file] += not by_length
            for length, own in by_length.items():
                sharing.setdefault(length, Counter()).update(own)
                found.setdefault(length, []).extend((run, number) for run in own)
        if sets.num_items[file] == sets.num_too_short[file]:
            raise UserError(
                f"an evaluation set with texts of at least {SHORTEST} words",
                f"{sets.num_items[file]} rows, all shorter, in {file}",
                "fix --decontaminate",
            )
        for length, counts in sharing.items():
            found[length] = [pair for pair in found[length] if counts[pair[0]] <= MAX_SHARING]
    for length, pairs in found.items():
        if pairs:
            runs = np.asarray([run for run, _ in pairs], dtype=np.uint64)
            numbers = np.asarray([number for _, number in pairs])
            sets.runs[length], first = np.unique(runs, return_index=True)
            sets.owners[length] = numbers[first]
    return sets


def _evaluation_items(file: str) -> Iterable[tuple[list[str], int]]:
    """(texts, line) of each row: all it holds, in whatever shape, solutions and tests included."""
    for item in read_source(file, Counter(), Reading(keep_rows=True)):
        texts = list(texts_in(item.row))
        if isinstance(item.value, Conversation | Document):
            texts += texts_of(item.value)
        if texts:
            yield list(dict.fromkeys(texts)), item.line
        else:
            raise UserError(
                "an evaluation set of prompts, conversations or code",
                f"{item.file}:{item.line}: {getattr(item.value, 'reason', item.value)}",
                "convert it to JSON lines with a 'prompt'",
            )


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts_in(inner)


def _runs_of(texts: list[str]) -> dict[int, set[int]]:
    by_length: dict[int, set[int]] = {}
    for text in texts:
        words = word_hashes(text)
        length = min(RUN, len(words))
        if length >= SHORTEST:
            by_length.setdefault(length, set()).update(ngram_hashes(words, length).tolist())
    return by_length


class HeldOutRuns:
    """Runs of 13 supervised tokens of the held-out rows, thinned out evenly when there are many.

    Which runs stay is decided by their hash, so the share that a row has in common is still
    estimated without bias.
    """

    def __init__(self, num_tokens: int) -> None:
        self._mask = np.uint64(0)
        while num_tokens // (int(self._mask) + 1) > _MAX_HELD_OUT_RUNS:
            self._mask = self._mask * np.uint64(2) + np.uint64(1)
        self._parts: list[np.ndarray] = []
        self._runs = np.empty(0, dtype=np.uint64)

    def add(self, batch: Any, wanted: np.ndarray) -> None:
        """Take the runs of the wanted rows of an Arrow batch; wanted [B] bool."""
        runs, rows = self._runs_of_rows(batch)
        self._parts.append(np.unique(runs[wanted[rows]]))

    def finish(self) -> None:
        """Make ready for `count`."""
        self._runs = np.unique(np.concatenate(self._parts)) if self._parts else self._runs
        self._parts = []

    def count(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """([B] runs of each row, [B] those that are held out) of an Arrow batch, int64."""
        runs, rows = self._runs_of_rows(batch)
        num_rows = batch.num_rows
        total = np.bincount(rows, minlength=num_rows)
        if not len(self._runs):
            return total, np.zeros(num_rows, dtype=np.int64)
        places = np.minimum(np.searchsorted(self._runs, runs), len(self._runs) - 1)
        return total, np.bincount(rows[self._runs[places] == runs], minlength=num_rows)

    def _runs_of_rows(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        ids = batch.column("input_ids")
        lengths = np.diff(ids.offsets.to_numpy())
        tokens = ids.flatten().to_numpy().astype(np.uint64)
        supervised = batch.column("loss_mask").flatten().to_numpy(zero_copy_only=False)
        rows = np.repeat(np.arange(batch.num_rows), lengths)
        runs = ngram_hashes(mixed(tokens + np.uint64(1)), RUN)
        count = len(runs)
        before = np.concatenate([[0], np.cumsum(supervised)])
        whole = before[RUN : RUN + count] - before[:count] == RUN
        whole &= rows[:count] == rows[RUN - 1 :][:count]
        whole &= (runs & self._mask) == 0
        return runs[whole], rows[:count][whole]
