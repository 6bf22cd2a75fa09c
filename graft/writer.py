"""Carry out a plan: link or copy the base's shards, stream the head, rename into place.

Shards are written by hand (header, then byte ranges copied from where the plan says), so that a
graft needs a few MB of memory whatever the size of its tensors, and no dtype is ever interpreted.
Links come first, because they take no space: what is left to copy is then known exactly, and a
disk that is too small is refused before the first byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from graft.convert import MadeTensor, PlannedTensor
from graft.index import INDEX_NAME, TensorInfo, index_of, write_json
from graft.manifest import MANIFEST_NAME
from graft.place import (
    FULL,
    Link,
    changed,
    copy_file,
    copy_range,
    no_space,
    require_space,
    share_files,
)
from graft.plan import QUANT_FILE, GraftPlan, source_state
from graft.plan_report import bytes_written, change_lines, tensor_lines
from graft.reader import TensorStore
from graft.record import graft_manifest
from graft.staging import staged_folder, sync


@dataclass(frozen=True, kw_only=True)
class GraftResult:
    """A graft that was written: where, by which plan, and the manifest that lies in it."""

    out: Path
    plan: GraftPlan
    manifest: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The result for `--json`: the manifest but for the base's old files, which are long."""
        manifest = {key: value for key, value in self.manifest.items() if key != "base_files"}
        return {"out": str(self.out), "head_folder": str(self.plan.head), **manifest}

    def as_text(self) -> str:
        """The result for people: which head went in, in which form, and what became of the base."""
        plan, files = self.plan, self.manifest["files"]
        stored = [files[name]["storage"] for name in plan.kept_shards]
        kinds = [f"{stored.count(kind)} {kind}" for kind in sorted(set(stored))]
        lines = [
            f"{self.out}: grafted",
            *tensor_lines(plan),
            f"  base shards: {len(stored)} untouched ({', '.join(kinds) or 'none'}), "
            f"{len(plan.reemitted_shards)} re-emitted without what left, "
            f"{len(plan.removed_shards)} left out",
        ]
        if "hard-link" in stored:
            lines.append("  a hard link is the base's own file: edit it in place and both change")
        return "\n".join([*lines, *change_lines(plan)])


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
        link: how kept shards are placed; see `graft/place.py`.
        tool: name and version of the tool, recorded in the manifest.

    Raises:
        UserError: if `out` may not be written or its disk is too small, if a demanded kind of link
            can't be made, or if base or head changed since they were planned.
    """
    try:
        with (
            staged_folder(
                out, overwrite=overwrite, sources=[plan.base, plan.head], mark=MANIFEST_NAME
            ) as staging,
            ThreadPoolExecutor(1) as disk,
        ):
            _require_unchanged(plan)
            storage = _place_shards(plan, staging, link)
            synced = []
            for shard in plan.written_shards:
                write_shard(staging / shard.name, shard.tensors)
                # The disk works while files are opened again and digests are made.
                synced.append(disk.submit(sync, staging / shard.name))
            for name in plan.copied_files:
                copy_file(plan.base / name, staging / name)
                storage[name] = "copy"
            write_json(staging / "config.json", plan.config)
            if plan.quant_file is not None:
                write_json(staging / QUANT_FILE, plan.quant_file)
            tensors = _reopen(plan, staging)
            write_json(staging / INDEX_NAME, index_of(tensors.infos(), plan.index_metadata))
            manifest = graft_manifest(plan, staging, tensors, storage, tool)
            write_json(staging / MANIFEST_NAME, manifest)
            _require_unchanged(plan)
            for written in synced:
                written.result()
    except OSError as error:
        if error.errno in FULL:
            raise no_space(out, "enough", "a disk that another writer filled meanwhile") from error
        raise
    return GraftResult(out=Path(out), plan=plan, manifest=manifest)


def _place_shards(plan: GraftPlan, staging: Path, link: Link) -> dict[str, str]:
    """Link the base's untouched shards, or copy them; how each is stored, by name."""
    storage: dict[str, str] = {}
    pairs = [(plan.base / name, staging / name) for name in plan.kept_shards]
    storage |= share_files(pairs, link)
    left = [pair for pair in pairs if pair[1].name not in storage]
    require_space(staging, bytes_written(plan) + sum(old.stat().st_size for old, _ in left))
    for source, target in left:
        copy_file(source, target)
        storage[target.name] = "copy"
    return storage


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
        for part in _parts(tensors):
            if not isinstance(part, ByteRange):
                target.writelines(part.chunks())
                continue
            target.flush()  # the copy goes past the buffer
            with part.file.open("rb") as source:
                if not copy_range(source.fileno(), part.offset, target.fileno(), part.nbytes):
                    raise changed(part.file)


class ByteRange(NamedTuple):
    """Bytes of a file, as many neighbouring tensors as there are."""

    file: Path
    offset: int
    nbytes: int


def _parts(tensors: Iterable[PlannedTensor]) -> list[ByteRange | MadeTensor]:
    """What to write, neighbours in one file joined.

    A head of 12,344 tensors in one file is then one copy and not as many.
    """
    parts: list[ByteRange | MadeTensor] = []
    for info in tensors:
        last = parts[-1] if parts else None
        if not isinstance(info, TensorInfo):
            parts.append(info)
        elif isinstance(last, ByteRange) and (last.file, last.offset + last.nbytes) == (
            info.shard,
            info.offset,
        ):
            parts[-1] = last._replace(nbytes=last.nbytes + info.nbytes)
        else:
            parts.append(ByteRange(info.shard, info.offset, info.nbytes))
    return parts


def _require_unchanged(plan: GraftPlan) -> None:
    for name, size, time in plan.source_state:
        path = Path(name)
        if not path.exists() or source_state([path]) != ((name, size, time),):
            raise changed(path)


def _reopen(plan: GraftPlan, staging: Path) -> TensorStore:
    """Read back what was written; a difference from the plan is our bug, not the user's."""
    names = [*plan.kept_shards, *(shard.name for shard in plan.written_shards)]
    tensors = TensorStore(staging / name for name in names)
    planned = {*plan.kept, *plan.added, *plan.replaced}
    if set(tensors.names) != planned:
        raise AssertionError(f"written and planned differ: {set(tensors.names) ^ planned}")
    return tensors
