"""Runs of words as 64-bit numbers: what near-duplicates and contamination are found by.

Words are letters and digits in lower case, so that layout and punctuation make no difference. The
numbers are the same on every machine (Python's own hash is not), and all else is numpy: a few
megabytes of text a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
import xxhash

from mtp.data.conversation import Conversation, Document

_WORD = re.compile(r"\w+")
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing


def texts_of(item: Conversation | Document, *, of_user_only: bool = False) -> Iterator[str]:
    """What was said, without system texts and schemas, which whole data sets share.

    Args:
        item: a conversation or document.
        of_user_only: leave out the assistant's and the tools' part of a conversation.
    """
    if isinstance(item, Document):
        yield item.text
        return
    for message in item.messages:
        if message.role == "system" or (of_user_only and message.role != "user"):
            continue
        yield message.content
        if message.reasoning:
            yield message.reasoning
        for call in message.tool_calls:
            yield call.name
            yield _values(json.loads(call.arguments))


def word_hashes(text: str) -> np.ndarray:
    """[W] uint64, one for each word."""
    words = _WORD.findall(text.lower())
    return np.fromiter(map(_word_hash, words), dtype=np.uint64, count=len(words))


def ngram_hashes(hashes: np.ndarray, n: int) -> np.ndarray:
    """[W - n + 1] uint64, one for each run of n; [W] uint64 hashes in. Empty when W < n."""
    count = len(hashes) - n + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    return joined_hashes([hashes[start : start + count] for start in range(n)])


def joined_hashes(columns: Iterable[np.ndarray]) -> np.ndarray:
    """[N] uint64, one for each row of columns of [N] uint64."""
    total = np.zeros(1, dtype=np.uint64)
    for column in columns:
        total = total * _BASE + column
    return mixed(total)


def mixed(values: np.ndarray) -> np.ndarray:
    """uint64 with every bit dependent on all bits: the last steps of splitmix64."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))


def _values(value: object) -> str:
    """The texts inside a call's arguments, without JSON's escapes."""
    if isinstance(value, dict):
        return " ".join(f"{key} {_values(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(_values, value))
    return str(value)
