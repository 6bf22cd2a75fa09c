"""Training from a cache of hidden states: no base in memory but its embedding and `lm_head`.

Shards are mapped into memory and read by row: a row's states lie side by side, and rows of like
length, which share a batch, lie close together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from graft.errors import UserError
from graft.index import read_header
from graft.reader import Checkpoint
from mtp.data.batches import row_lengths
from mtp.data.store import load_prepared
from mtp.teacher.cache_layout import plan_layout, read_cache_index, shard_path, state_width
from mtp.teacher.identity import base_identity, data_identity, differences
from mtp.teacher.source import BaseEnds, RowBatch, require_own_predictions

_SHARDS_CHECKED = 8
TENSORS = ("hidden", "input_ids", "checked", "checked_argmax", "checked_logprob")


class CachedSource(BaseEnds):
    """Hidden states of one split, from `mtp data cache`. A `HiddenSource`."""

    def __init__(
        self,
        cache: Path,
        base: Path,
        data: Path,
        *,
        split: str = "train",
        device: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Open a cache and check it against its base and data.

        Args:
            cache: folder of `mtp data cache`.
            base: the base it was made from.
            data: the prepared data it was made from.
            split: whose rows `batch_hidden` will be asked for.
            device: where batches go.
            dtype: of embedding, `lm_head` and batches; float32 on a CPU and bfloat16 on a GPU when
                not given. The stored states are bfloat16 in any case.

        Raises:
            UserError: an unfinished or damaged cache, another base, other data, or states that do
                not give the base's own predictions.
        """
        self._cache, self._split = Path(cache), split
        index, checkpoint = read_cache_index(self._cache), Checkpoint(base)
        _require_complete(self._cache, index, split)
        _require_same(self._cache, index, checkpoint, data, split)
        lengths = row_lengths(load_prepared(data)[split])
        self._layout = plan_layout(lengths, index["tokens_per_shard"])
        self._open: dict[int, Any] = {}
        self._aux_layers: list[int] = index.get("aux_layers", [])
        super().__init__(checkpoint, device=device, dtype=dtype)
        self._check_shards(state_width(index))

    def batch_hidden(self, batch: RowBatch, layers: Sequence[int] = ()) -> torch.Tensor:
        """[B, T, H] after the final norm, or [B, T, (A + 1) * H] with A layers; zeros on padding.

        Raises:
            UserError: layers that were not cached, or a row of other token ids than those that
                the states were computed from.
        """
        num_rows, longest = batch.input_ids.shape
        columns = self._columns(layers)
        # Pinned for a GPU: then the copy neither waits for the GPU nor makes it wait.
        hidden = torch.zeros(
            num_rows, longest, len(columns),
            dtype=torch.bfloat16, pin_memory=self.device.type == "cuda",
        )  # fmt: skip
        for target, ids, row in zip(hidden, batch.input_ids.cpu(), batch.rows, strict=True):
            length, start = int(self._layout.lengths[row]), int(self._layout.offset_of[row])
            file = self._shard(int(self._layout.shard_of[row]))
            stored = file.get_slice("input_ids")[start : start + length]
            if length > longest or not torch.equal(stored, ids[:length].int()):
                raise UserError(
                    f"row {row} of {self._split} as it was cached in {self._cache}",
                    "other token ids",
                    "make the cache again from this data",
                )
            found = file.get_slice("hidden")[start : start + length]
            target[:length] = found if len(columns) == found.shape[1] else found[:, columns]
        return hidden.to(self.device, self.dtype, non_blocking=True)

    def _columns(self, layers: Sequence[int]) -> torch.Tensor:
        """Columns of a stored state that hold these layers' outputs and the final state."""
        size, cached = self.lm_head.shape[1], self._aux_layers
        if missing := [layer for layer in layers if layer not in cached]:
            raise UserError(
                f"a cache with the output of layers {', '.join(map(str, layers))}",
                f"none of {', '.join(map(str, missing))} in {self._cache}",
                "make one with `mtp data cache --recipe` and this recipe",
            )
        parts = [*(cached.index(layer) for layer in layers), len(cached)]
        return torch.cat([torch.arange(part * size, (part + 1) * size) for part in parts])

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            path = shard_path(self._cache, self._split, number)
            self._open[number] = safe_open(path, framework="pt")
        return self._open[number]

    def _check_shards(self, width: int) -> None:
        """All headers, and the predictions of some shards."""
        for number, members in enumerate(self._layout.shards):
            path = shard_path(self._cache, self._split, number)
            header = read_header(path)
            tokens = int(self._layout.lengths[members].sum())
            missing = [name for name in TENSORS if name not in header]
            if missing or header["hidden"].shape != (tokens, width):
                raise UserError(
                    f"hidden states [{tokens}, {width}] in {path}, and what they are checked by",
                    f"no {', '.join(missing)}" if missing else "others",
                    "remove that file and run `mtp data cache` again",
                )
        num_shards = len(self._layout.shards)
        spread = np.linspace(0, num_shards - 1, min(num_shards, _SHARDS_CHECKED)).astype(int)
        for number in spread:
            file = self._shard(int(number))
            checked = file.get_tensor("checked").tolist()
            hidden = torch.cat([file.get_slice("hidden")[i : i + 1] for i in checked])
            hidden = hidden[:, -self.lm_head.shape[1] :]
            argmax, logprob = (file.get_tensor(f"checked_{k}") for k in ("argmax", "logprob"))
            path = shard_path(self._cache, self._split, int(number))
            require_own_predictions(hidden, self.lm_head, argmax, logprob, path)


def _require_complete(cache: Path, index: dict[str, Any], split: str) -> None:
    if split not in index["splits"]:
        raise UserError(
            f"hidden states of {split} in {cache}",
            f"those of {', '.join(index['splits'])}",
            "make the cache again with this split",
        )
    if not index["complete"]:
        raise UserError(
            f"a finished cache at {cache}",
            "an interrupted one",
            "run the same `mtp data cache` command again: it goes on where it stopped",
        )


def _require_same(
    cache: Path, index: dict[str, Any], checkpoint: Checkpoint, data: Path, split: str
) -> None:
    given = {"base": base_identity(checkpoint), "data": data_identity(data, [split])}
    cached = {"base": index["base"], "data": dict(index["data"])}
    ids = cached["data"]["token_ids_sha256"]
    cached["data"]["token_ids_sha256"] = {split: ids.get(split)}
    if found := differences(cached, given):
        raise UserError(
            f"the base and data that the cache in {cache} was made from",
            "; ".join(found[:8]) + (f"; {len(found) - 8} more" if len(found) > 8 else ""),
            "give those, or make another cache",
        )
