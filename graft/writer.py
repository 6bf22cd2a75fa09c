"""Carry out a plan: stage, link or copy the base's shards, stream the head, rename into place.

Shards are written by hand (header, then byte ranges copied from where the plan says), so that a
graft needs a few MB of memory whatever the size of its tensors, and no dtype is ever interpreted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graft.convert import PlannedTensor
from graft.errors import UserError
from graft.index import INDEX_NAME, TensorInfo, index_of, write_json
from graft.manifest import MANIFEST_NAME
from graft.plan import QUANT_FILE, GraftPlan, source_state
from graft.reader import CHUNK_BYTES, TensorStore
from graft.record import graft_manifest
from graft.staging import staged_folder

Link = Literal["auto", "hard", "copy"]


@dataclass(frozen=True, kw_only=True)
class GraftResult:
    """A graft that was written: where, by which plan, and the manifest that lies in it."""

    out: Path
    plan: GraftPlan
    manifest: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The result for `--json`."""
        return {"out": str(self.out), "head_folder": str(self.plan.head), **self.manifest}

    def as_text(self) -> str:
        """The result for people: which head went in, in which form, and what became of the base."""
        plan, files = self.plan, self.manifest["files"]
        linked = sum(file["storage"] == "hard-link" for file in files.values())
        lines = [
            f"{self.out}: head {plan.head} ({plan.num_layers} layers, {plan.form}, "
            f"{plan.head_bytes / 1e6:.1f} MB) on base {plan.base}",
            f"  base: {len(plan.kept)} tensors kept ({plan.kept_bytes / 1e6:.1f} MB); "
            f"{len(plan.kept_shards)} shards untouched, {linked} of them hard-linked to the base",
            f"  head: {len(plan.added)} tensors added, {len(plan.replaced)} replaced, "
            f"{len(plan.dropped)} old ones dropped",
        ]
        lines += [f"  config: {change[:160]}" for change in plan.config_changes]
        lines += [f"  mismatch allowed: {difference}" for difference in plan.mismatches]
        lines += [f"  left out: {name}" for name in plan.left_out_files]
        return "\n".join(lines)


def write_graft(
    plan: GraftPlan,
    out: Path,
    *,
    overwrite: bool = False,
    link: Link = "auto",
    tool: str | None = None,
) -> GraftResult:
    """Write the grafted checkpoint to `out`.

    Args:
        plan: from `plan_graft`.
        out: the folder to make.
        overwrite: replace an existing `out`.
        link: hard-link kept shards (`hard`), copy them (`copy`), or link where possible (`auto`).
        tool: name and version of the tool, recorded in the manifest.

    Raises:
        UserError: if `out` may not be written, or base or head changed since they were planned.
    """
    with staged_folder(out, overwrite=overwrite, sources=[plan.base, plan.head]) as staging:
        _require_unchanged(plan)
        storage: dict[str, str] = {}
        for name in plan.kept_shards:
            storage[name] = _place_shard(plan.base / name, staging / name, link)
        for shard in plan.written_shards:
            write_shard(staging / shard.name, shard.tensors)
        for name in plan.copied_files:
            shutil.copyfile((plan.base / name).resolve(), staging / name)
        write_json(staging / "config.json", plan.config)
        if plan.quant_file is not None:
            write_json(staging / QUANT_FILE, plan.quant_file)
        tensors = _reopen(plan, staging)
        write_json(staging / INDEX_NAME, index_of(tensors.infos(), plan.index_metadata))
        storage |= dict.fromkeys(plan.copied_files, "copy")
        manifest = graft_manifest(plan, staging, tensors, storage, tool)
        write_json(staging / MANIFEST_NAME, manifest)
        _require_unchanged(plan)
    return GraftResult(out=Path(out), plan=plan, manifest=manifest)


def write_shard(path: Path, tensors: Iterable[PlannedTensor]) -> None:
    """Write one safetensors file, in the given order: byte ranges of others, or made on the way."""
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for info in tensors:
        end = position + info.nbytes
        header[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("xb") as target:
        target.write(len(raw).to_bytes(8, "little") + raw)
        for info in tensors:
            if isinstance(info, TensorInfo):
                with info.shard.open("rb") as source:
                    source.seek(info.offset)
                    _copy(source.read, target.write, info)
            else:
                target.writelines(info.chunks())


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], int], info: TensorInfo) -> None:
    left = info.nbytes
    while left:
        chunk = read(min(CHUNK_BYTES, left))
        if not chunk:
            raise _changed(info.shard)
        left -= len(chunk)
        write(chunk)


def _place_shard(source: Path, target: Path, link: Link) -> str:
    source = source.resolve()  # the hub cache's snapshots are links to blobs
    if link != "copy":
        try:
            os.link(source, target)
            return "hard-link"
        except OSError as error:
            if link == "hard":
                raise UserError(
                    f"a file system that can hard-link {source}",
                    error.strerror or str(error),
                    "pass link='copy'",
                ) from error
    shutil.copyfile(source, target)
    return "copy"


def _require_unchanged(plan: GraftPlan) -> None:
    for name, size, time in plan.source_state:
        path = Path(name)
        if not path.exists() or source_state([path]) != ((name, size, time),):
            raise _changed(path)


def _changed(path: Path) -> UserError:
    return UserError(
        f"{path} as it was when the graft was planned", "a changed file", "run the graft again"
    )


def _reopen(plan: GraftPlan, staging: Path) -> TensorStore:
    """Read back what was written; a difference from the plan is our bug, not the user's."""
    names = [*plan.kept_shards, *(shard.name for shard in plan.written_shards)]
    tensors = TensorStore(staging / name for name in names)
    planned = {*plan.kept, *plan.added, *plan.replaced}
    if set(tensors.names) != planned:
        raise AssertionError(f"written and planned differ: {set(tensors.names) ^ planned}")
    return tensors
