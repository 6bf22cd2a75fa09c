"""How a cache of hidden states lies on disk.

    CACHE/cache.json               what it was made from; `complete` once every shard is there
    CACHE/train/00000.safetensors  hidden [N, H] BF16 of whole rows, one after the other
    CACHE/continuations/           held-out prompts continued by the base (`mtp.held_out`)

Rows are stored from the longest to the shortest: a batch groups rows of like length, so its reads
lie close together, padding while building is small, and a row too long for the memory fails first.
Which row lies where follows from the rows' lengths alone; nothing else has to be looked up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graft.errors import UserError
from graft.index import read_json
from graft.tensor_file import save_tensors

SCHEMA_VERSION = 1
INDEX = "cache.json"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each row of one split lies.

    Args:
        lengths: [R] int64, tokens of each row.
        shards: rows of each shard, in order.
        shard_of: [R] int64.
        offset_of: [R] int64, first token of a row within its shard.
    """

    lengths: np.ndarray
    shards: list[np.ndarray]
    shard_of: np.ndarray
    offset_of: np.ndarray


def plan_layout(lengths: np.ndarray, tokens_per_shard: int) -> Layout:
    """Cut rows, longest first, into shards of about `tokens_per_shard` tokens (at least a row)."""
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    number = (ends - lengths[order]) // tokens_per_shard
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    shards = np.split(order, starts[1:]) if len(order) else []
    shard_of, offset_of = np.zeros_like(lengths), np.zeros_like(lengths)
    for index, rows in enumerate(shards):
        shard_of[rows] = index
        offset_of[rows] = np.cumsum(lengths[rows]) - lengths[rows]
    return Layout(lengths=lengths, shards=shards, shard_of=shard_of, offset_of=offset_of)


def state_width(index: dict[str, Any]) -> int:
    """Numbers a token: the output of A layers, in their order, then the state after the norm."""
    return int(index["hidden_size"] * (len(index.get("aux_layers", [])) + 1))


def shard_path(cache: Path, split: str, index: int) -> Path:
    """The file of one shard."""
    return cache / split / f"{index:05d}.safetensors"


def save_aside(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a file that appears under its name only once it is complete and on disk."""
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(".part")
    save_tensors(tensors, aside, metadata)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.rename(path)


def read_cache_index(cache: Path) -> dict[str, Any]:
    """Read cache.json.

    Raises:
        UserError: not a cache, or one of another schema.
    """
    if not (cache / INDEX).is_file():
        raise UserError(
            f"a cache of hidden states at {cache} (with {INDEX})",
            "none",
            "make one with `mtp data cache`",
        )
    index = read_json(cache / INDEX)
    fields = ("complete", "base", "data", "tokens_per_shard", "hidden_size", "dtype", "splits")
    missing = [field for field in fields if field not in index]
    if index.get("schema_version") != SCHEMA_VERSION or missing:
        raise UserError(
            f"a cache of schema {SCHEMA_VERSION} in {cache / INDEX}",
            f"schema {index.get('schema_version')!r}, without {', '.join(missing) or 'nothing'}",
            "make the cache again with this version",
        )
    return index
