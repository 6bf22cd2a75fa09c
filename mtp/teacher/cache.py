"""`mtp data cache`: the base's hidden states of every training row, once, on disk.

One pass over the base then serves any number of trainings, which need no base in memory. The price
is disk: 2 bytes a hidden unit, 4 kB a token at hidden size 2048, 4 GB a million tokens.

A shard is written aside and renamed, and is complete as soon as it has its name; so a killed run
loses the shard it was at, and the same command goes on there.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open

from graft.errors import UserError
from graft.index import read_header, write_json
from graft.place import require_space
from graft.reader import Checkpoint
from graft.staging import locked
from mtp.data.batches import row_lengths
from mtp.data.store import load_prepared, require_tokenizer_of
from mtp.progress import bar
from mtp.teacher.cache_layout import (
    INDEX,
    SCHEMA_VERSION,
    plan_layout,
    read_cache_index,
    save_aside,
    shard_path,
    state_width,
)
from mtp.teacher.identity import base_identity, data_identity, differences
from mtp.teacher.source import require_own_predictions

NUM_CHECKS = 32  # positions of a shard whose predictions are compared with the base's own
GIGABYTE = 10**9
LOCK = ".lock"


class StateMaker(Protocol):
    """A base that can compute states: in process, or a server.

    row_states: token ids [T] each -> [T, H] each, after the final norm; with A layers
        [T, (A + 1) * H], their output first.
    own_predictions: token ids [T], positions [N] -> argmax [N] and its log-probability [N], by the
        base's own output path.
    """

    @property
    def name(self) -> str: ...
    @property
    def lm_head(self) -> torch.Tensor: ...
    def row_states(
        self, rows: list[torch.Tensor], layers: Sequence[int] = ()
    ) -> list[torch.Tensor]: ...
    def own_predictions(
        self, row: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def build_cache(
    maker: StateMaker,
    base: Path,
    data: Path,
    out: Path,
    *,
    splits: list[str],
    max_gigabytes: float,
    shard_gigabytes: float = 1.0,
    tokens_per_batch: int = 8192,
    layers: Sequence[int] = (),
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the cache, or go on with one that was interrupted.

    Args:
        maker: computes the states.
        base: folder of the same base: its identity is recorded.
        data: folder of `mtp data prepare`.
        out: the cache's folder.
        splits: of the data.
        max_gigabytes: refuse to write more than this.
        shard_gigabytes: size of one shard, and what a kill can lose.
        tokens_per_batch: tokens of one forward pass, padding included; a longer row goes alone.
        layers: base layers whose output is kept too, for a draft that reads it.
        overwrite: start anew where `out` holds another cache.

    Returns:
        {"tokens", "rows", "shards", "shards_found", "bytes", "argmax_agreement"}.

    Raises:
        UserError: another base or other data than the cache in `out` was begun with, no room, or
            states that do not give the base's own predictions.
    """
    require_tokenizer_of(data, base)
    rows = load_prepared(data)
    lengths = {split: row_lengths(rows[split]) for split in splits}
    index = _index(Checkpoint(base), data, lengths, maker.name, shard_gigabytes, layers)
    size = 2 * state_width(index)
    with _claimed(out, index, overwrite=overwrite):
        layouts = {s: plan_layout(n, index["tokens_per_shard"]) for s, n in lengths.items()}
        shards = [(s, i, m) for s, layout in layouts.items() for i, m in enumerate(layout.shards)]
        missing = [shard for shard in shards if not _is_done(out, *shard)]
        num_tokens = sum(int(n.sum()) for n in lengths.values())
        left = sum(int(lengths[split][members].sum()) for split, _, members in missing)
        _state_size(out, num_tokens * size, left * size, max_gigabytes)
        agreements = []
        with bar(left, "hidden states", "token") as advance:
            for split, number, members in missing:
                ids, path = _token_ids(rows[split], members), shard_path(out, split, number)
                agreements.append(
                    _write_shard(maker, ids, members, path, tokens_per_batch, layers, advance)
                )
        _write_index(out, {**index, "complete": True})
    return {
        "schema_version": SCHEMA_VERSION,
        "tokens": num_tokens, "rows": sum(len(n) for n in lengths.values()),
        "shards": len(shards), "shards_found": len(shards) - len(missing),
        "bytes": num_tokens * size,
        "argmax_agreement": float(np.mean(agreements)) if agreements else None,
    }  # fmt: skip


def _index(
    checkpoint: Checkpoint,
    data: Path,
    lengths: dict[str, np.ndarray],
    source: str,
    shard_gigabytes: float,
    layers: Sequence[int],
) -> dict[str, Any]:
    hidden_size = int(checkpoint.text_config["hidden_size"])
    width = hidden_size * (len(layers) + 1)
    return {
        "schema_version": SCHEMA_VERSION, "kind": "hidden_states", "complete": False,
        "position": "after the final norm", "dtype": "BF16", "hidden_size": hidden_size,
        "tokens_per_shard": max(int(shard_gigabytes * GIGABYTE) // (2 * width), 1),
        **({"aux_layers": list(layers)} if layers else {}),
        "source": source,
        "splits": {s: {"rows": len(n), "tokens": int(n.sum())} for s, n in lengths.items()},
        "base": base_identity(checkpoint), "data": data_identity(data, list(lengths)),
    }  # fmt: skip


@contextlib.contextmanager
def _claimed(out: Path, index: dict[str, Any], *, overwrite: bool) -> Iterator[None]:
    """Hold the cache's lock, over an `out` that is new or was begun with the same index."""
    strangers = (
        [path for path in out.iterdir() if not path.name.startswith(".")] if out.exists() else []
    )
    if strangers and not (out / INDEX).is_file():
        raise UserError("a new or an unfinished cache", f"{out}, another folder", "choose --out")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK, out):
        if (out / INDEX).is_file():
            if overwrite:
                for split in out.iterdir():
                    if split.is_dir():
                        shutil.rmtree(split)
            else:
                begun = read_cache_index(out)
                found = differences(
                    {k: v for k, v in begun.items() if k != "complete"},
                    {k: v for k, v in index.items() if k != "complete"},
                )
                if found:
                    raise UserError(
                        f"the base, data and options that the cache in {out} was begun with",
                        "; ".join(found),
                        "choose another --out, or pass --overwrite to begin anew",
                    )
        _write_index(out, index)
        yield


def _write_index(out: Path, index: dict[str, Any]) -> None:
    aside = out / f".{INDEX}.part"
    write_json(aside, index)
    aside.rename(out / INDEX)


def _is_done(out: Path, split: str, number: int, members: np.ndarray) -> bool:
    path = shard_path(out, split, number)
    if not path.is_file():
        return False
    read_header(path)  # a damaged file is an error, not a reason to go on quietly
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("rows").tolist() == members.tolist()


def _state_size(out: Path, whole: int, left: int, max_gigabytes: float) -> None:
    """Say on stderr what will be written; refuse what exceeds the budget or the disk."""
    print(
        f"{out}: {whole / GIGABYTE:.3f} GB of hidden states, {left / GIGABYTE:.3f} GB to write",
        file=sys.stderr,
    )
    if whole > max_gigabytes * GIGABYTE:
        raise UserError(
            f"at most {max_gigabytes:g} GB of hidden states (--max-gigabytes)",
            f"{whole / GIGABYTE:.3f} GB",
            "raise the budget, or prepare less data",
        )
    require_space(out, left)


def _token_ids(dataset: Any, members: np.ndarray) -> list[torch.Tensor]:
    """Token ids [T] int64 of some rows."""
    columns = dataset.select_columns(["input_ids"]).with_format("arrow")
    column = columns[members.tolist()].column("input_ids")
    return [torch.tensor(row.values.to_numpy()).long() for row in column]


def _write_shard(
    maker: StateMaker,
    rows: list[torch.Tensor],
    members: np.ndarray,
    path: Path,
    tokens_per_batch: int,
    layers: Sequence[int],
    advance: Callable[[int], object],
) -> float:
    """Compute, check and write one shard; the share of checked positions that agree exactly."""
    states: list[torch.Tensor] = []
    for batch in _batches(rows, tokens_per_batch):
        states += [state.to("cpu", torch.bfloat16) for state in maker.row_states(batch, layers)]
        advance(sum(len(row) for row in batch))
    found = [len(state) for state in states]
    if found != [len(row) for row in rows]:
        raise ValueError("a state for every token: the maker has a bug")
    positions = torch.linspace(0, found[-1] - 1, min(NUM_CHECKS, found[-1])).long()
    argmax, logprob = (part.cpu() for part in maker.own_predictions(rows[-1], positions))
    agreement = require_own_predictions(
        states[-1][positions, -maker.lm_head.shape[1] :],
        maker.lm_head,
        argmax,
        logprob,
        f"row {members[-1]} of {path}",
    )
    tensors = {
        "hidden": torch.cat(states), "input_ids": torch.cat(rows).int(),
        "rows": torch.tensor(members), "checked": sum(found[:-1]) + positions,
        "checked_argmax": argmax.int(), "checked_logprob": logprob.float(),
    }  # fmt: skip
    save_aside(tensors, path)
    return agreement


def _batches(rows: list[torch.Tensor], tokens_per_batch: int) -> Iterator[list[torch.Tensor]]:
    """Neighbours, which are of like length: longest first, so the first sets the padding."""
    batch: list[torch.Tensor] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(batch[0]) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
