"""Groups of conversations that are nearly the same, or answers to the same request.

MinHash over runs of 5 words, 14 bands of 8 (the values of datatrove's MinhashConfig): two texts
meet with probability 1 - (1 - s^8)^14 at a Jaccard similarity of s, which is half at 0.69 and
0.92 at 0.8. Runs of one task differ more than that, so the same opening request groups too. Groups
are closed transitively: what is near to a member is in the group. Apart from them, a conversation
that is the exact beginning of another says nothing of its own.

`datasketch` offers the same, but keeps its tables as Python objects: some kilobytes a row, where
a run must stay below 1 GB for millions of rows. Here a row is 15 numbers in a file, and a band is
sorted at a time.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from mtp.data.conversation import Conversation, Document
from mtp.data.ngrams import joined_hashes, mixed, ngram_hashes, texts_of, word_hashes

WORDS, BANDS, ROWS_A_BAND = 5, 14, 8
NUM_KEYS = BANDS + 1
_MIN_REQUEST_WORDS = 8  # "Continue." and the like open unrelated conversations
_SHINGLES_AT_ONCE = 1 << 12
_BYTES_AT_ONCE = 1 << 23
_GENERATOR = np.random.default_rng(20160331)
_FACTORS = _GENERATOR.integers(1 << 63, size=(BANDS * ROWS_A_BAND, 1), dtype=np.uint64) * np.uint64(
    2
) + np.uint64(1)
_OFFSETS = _GENERATOR.integers(1 << 63, size=(BANDS * ROWS_A_BAND, 1), dtype=np.uint64)


def group_keys(item: Conversation | Document) -> np.ndarray:
    """[NUM_KEYS] uint64; items that share one at the same place belong together, 0 is none."""
    words = np.concatenate([word_hashes(text) for text in texts_of(item)] or [_EMPTY])
    keys = np.zeros(NUM_KEYS, dtype=np.uint64)
    if len(words):
        shingles = np.unique(ngram_hashes(words, min(WORDS, len(words))))
        smallest = np.full(len(_FACTORS), np.iinfo(np.uint64).max, dtype=np.uint64)
        for start in range(0, len(shingles), _SHINGLES_AT_ONCE):
            some = shingles[None, start : start + _SHINGLES_AT_ONCE] * _FACTORS + _OFFSETS
            np.minimum(smallest, some.min(axis=1), out=smallest)
        keys[:BANDS] = joined_hashes(mixed(smallest).reshape(BANDS, ROWS_A_BAND).T)
    if isinstance(item, Conversation):
        request = word_hashes(next(texts_of(item, of_user_only=True), ""))
        if len(request) >= _MIN_REQUEST_WORDS:
            keys[BANDS] = ngram_hashes(request, len(request))[0]
    return keys


_EMPTY = np.empty(0, dtype=np.uint64)


def beginning_keys(conversation: Conversation) -> np.ndarray:
    """[R] uint64: what is said up to each assistant turn, that turn included.

    A log of requests holds a conversation once for each of its turns; all but the longest are
    beginnings of it. The same key means the same turns, reasoning and supervision included, so
    that nothing is lost with the shorter one.
    """
    state = xxhash.xxh3_64("\0".join(conversation.tools).encode())
    keys = []
    for message in conversation.messages:
        said = [value for name, value in vars(message).items() if name != "token_ids"]
        state.update(json.dumps(said, default=vars).encode())
        if message.role == "assistant":
            keys.append(state.intdigest())
    return np.asarray(keys, dtype=np.uint64)


class BeginningFile:
    """Keys of conversations, and of their beginnings, which wait in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("wb")
        self._whole = array("Q")

    def add(self, keys: np.ndarray) -> None:
        """Take the next one's `beginning_keys`; none for what is no conversation."""
        self._stream.write(keys[:-1].tobytes())
        self._whole.append(int(keys[-1]) if len(keys) else 0)

    def contained(self) -> np.ndarray:
        """[C] bool: what is the beginning of a longer one."""
        self._stream.flush()
        whole = np.frombuffer(self._whole, dtype=np.uint64)
        order = np.argsort(whole, kind="stable")
        ordered = whole[order]
        found = np.zeros(len(whole), dtype=bool)
        with self._path.open("rb") as stream:
            while len(some := np.frombuffer(stream.read(_BYTES_AT_ONCE), dtype=np.uint64)):
                # All with the same key: from the first place on to the last.
                wanted = np.unique(some)
                starts = np.searchsorted(ordered, wanted, side="left")
                ends = np.searchsorted(ordered, wanted, side="right")
                for start, end in zip(starts[starts < ends], ends[starts < ends], strict=True):
                    found[order[start:end]] = True
        return found & (whole != 0)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._stream.close()


class DigestSet:
    """Digests that were seen, in some 20 bytes each, where Python's set takes 100.

    A table of 64-bit numbers with linear probing. Among 5 million different rows two meet with
    probability 1e-6.
    """

    def __init__(self) -> None:
        self._table = np.zeros(1 << 10, dtype=np.uint64)
        self._count = 0

    def add(self, digest: str) -> bool:
        """Take a digest in hexadecimal; whether it is new."""
        number = int(digest[:16], 16) or 1  # 0 is a free place
        place = self._place(number)
        if self._table[place]:
            return False
        self._table[place] = number
        self._count += 1
        if 3 * self._count > 2 * len(self._table):
            numbers = self._table[self._table != 0].tolist()
            self._table = np.zeros(2 * len(self._table), dtype=np.uint64)
            for number in numbers:
                self._table[self._place(number)] = number
        return True

    def _place(self, number: int) -> int:
        """Where a number stands, or would."""
        table, last = self._table, len(self._table) - 1
        place = number & last
        while (found := int(table[place])) and found != number:
            place = (place + 1) & last
        return place


class KeyFile:
    """The keys of all conversations, in a file, in the order in which they were added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("wb")

    def add(self, keys: np.ndarray) -> None:
        """Append one conversation's keys, [NUM_KEYS] uint64."""
        self._stream.write(keys.tobytes())

    def groups(self) -> np.ndarray:
        """[C] int64: for each conversation the first member of its group."""
        self._stream.flush()
        return groups_of(self._columns())

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._stream.close()

    def _columns(self) -> Iterator[np.ndarray]:
        """The keys of all at one place after another, [C] uint64, in the same array each time.

        The file is read once for each: a map of it would come to be in memory whole.
        """
        num_at_once = max(1, _BYTES_AT_ONCE // (8 * NUM_KEYS)) * NUM_KEYS
        column = np.empty(self._path.stat().st_size // (8 * NUM_KEYS), dtype=np.uint64)
        for place in range(NUM_KEYS):
            start = 0
            with self._path.open("rb") as stream:
                while len(keys := np.fromfile(stream, dtype=np.uint64, count=num_at_once)):
                    here = keys[place::NUM_KEYS]
                    column[start : start + len(here)] = here
                    start += len(here)
            yield column


def groups_of(columns: Iterable[np.ndarray]) -> np.ndarray:
    """[C] int64, the first member of each conversation's group; NUM_KEYS columns [C] uint64."""
    links, count = [], 0
    for column in columns:
        links.append(_links(column))
        count = len(column)
    first = np.arange(count, dtype=np.int64)
    changed = True
    while changed:
        before = first.copy()
        for left, right in links:
            # The smaller root wins for both roots and both members; repeated until all agree.
            smaller = np.minimum(first[left], first[right])
            for members in (first[left], first[right], left, right):
                np.minimum.at(first, members, smaller)
        first = first[first]
        changed = not np.array_equal(before, first)
    return first


def _links(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of neighbours in the order of their keys that have the same one."""
    order = np.argsort(column, kind="stable")
    ordered = column[order]
    same = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
    return order[:-1][same], order[1:][same]
