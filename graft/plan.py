"""Decide everything about a graft before the first byte is written. All refusals happen here.

A plan is made from headers, configs and the head's values alone. The writer only carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.config_patch import differences
from graft.convert import PlannedTensor
from graft.errors import UserError
from graft.formats import Form, head_form, quantization_blocks
from graft.head_check import shape_problems, value_problems
from graft.head_plan import plan_head
from graft.index import INDEX_NAME, TensorInfo, is_file_name
from graft.layout import base_tensor_names
from graft.manifest import (
    HEAD_METADATA,
    MANIFEST_NAME,
    HeadFolder,
    base_fingerprint,
    fingerprint_differences,
)
from graft.reader import PICKLE_SUFFIXES, Checkpoint
from graft.staging import check_output
from graft.text_only import TextOnly, plan_text_only, without_vision

QUANT_FILE = "hf_quant_config.json"
HEAD_SHARD_BYTES = 5_000_000_000
OTHER_WEIGHTS = (*PICKLE_SUFFIXES, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx")
BASE_FILES = ("config.json", QUANT_FILE, INDEX_NAME)  # rewritten; the manifest keeps the old ones
OF_A_FOLDER = (MANIFEST_NAME, HEAD_METADATA, "SHA256SUMS")  # true of the base's folder only


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One shard to write: `tensors` say where each tensor's bytes come from."""

    name: str
    tensors: tuple[PlannedTensor, ...]


@dataclass(frozen=True, kw_only=True)
class GraftPlan:
    """What a graft keeps, adds, replaces and drops, and the files that it will write."""

    base: Path
    head: Path
    num_layers: int
    form: Form
    kept: tuple[str, ...]
    added: tuple[str, ...]
    replaced: tuple[str, ...]
    dropped: tuple[str, ...]
    kept_shards: tuple[str, ...]
    written_shards: tuple[ShardPlan, ...]
    reemitted_shards: tuple[str, ...]
    removed_shards: tuple[str, ...]
    copied_files: tuple[str, ...]
    left_out_files: tuple[str, ...]
    config: dict[str, Any]
    quant_file: dict[str, Any] | None
    config_changes: tuple[str, ...]
    index_metadata: dict[str, Any]
    kept_bytes: int
    head_bytes: int
    base_fingerprint: dict[str, Any]
    head_metadata: dict[str, Any]
    mismatches: tuple[str, ...]
    text_only: TextOnly | None
    base_files: dict[str, bytes | None]
    source_state: tuple[tuple[str, int, int], ...]


def plan_graft(
    base: Path,
    head: Path,
    *,
    out: Path | None = None,
    overwrite: bool = True,
    allow_mismatch: bool = False,
    text_only: bool = False,
    head_shard_bytes: int = HEAD_SHARD_BYTES,
) -> GraftPlan:
    """Plan a graft of the head folder `head` onto the checkpoint `base`.

    Args:
        base: a Qwen3.5-like checkpoint; never written to.
        head: a head folder (`head.json`, `mtp.safetensors`).
        out: where the result will go; refused here if it would touch an input.
        overwrite: whether `out` may exist.
        allow_mismatch: graft a head that was made for another base; recorded in the manifest.
        text_only: leave the vision tower out.
        head_shard_bytes: at most this many tensor bytes in one head shard.

    Raises:
        UserError: for every reason not to do it.
    """
    base, head = Path(base), Path(head)
    if out is not None:
        check_output(out, overwrite=overwrite, sources=[base, head], mark=MANIFEST_NAME)
    checkpoint = Checkpoint(base)
    checkpoint.require_supported()
    base_tensor_names(checkpoint)
    folder = HeadFolder(head)
    fingerprint = base_fingerprint(checkpoint)
    # Before completeness: a head of another base has wrong shapes, and this is the better reason.
    mismatches = fingerprint_differences(folder.metadata["base_fingerprint"], fingerprint)
    if mismatches and not allow_mismatch:
        raise _mismatch(base, mismatches)
    _require_sound_head(checkpoint, folder)

    text = plan_text_only(checkpoint) if text_only else None
    start = text.config if text else checkpoint.config
    gone = {*checkpoint.head_names, *(text.dropped if text else ())}
    kept = tuple(name for name in checkpoint.names if name not in gone)
    placed = plan_head(checkpoint, folder, map(checkpoint.info, kept), start)
    config, quant_file = placed.config, placed.quant_file
    if text:
        config, quant_file = without_vision(config), quant_file and without_vision(quant_file)
    new = {info.name for info in placed.tensors}
    kept_shards, written = _plan_shards(checkpoint, gone)
    reemitted = tuple(shard.name for shard in written)
    taken = [*kept_shards, *reemitted]
    written += _head_shards(placed.tensors, taken, head_shard_bytes)
    changes = _flattening(checkpoint.config, start) + differences(start, config)
    changes += [f"{QUANT_FILE} {c}" for c in _quant_file_changes(checkpoint, quant_file)]
    copied, left_out = other_files(checkpoint, text.left_out_files if text else ())
    base_files = {name: _content(base / name) for name in BASE_FILES}
    sources = [*(base / name for name in checkpoint.shards), *_shard_paths(folder.infos())]
    sources += [base / name for name, content in base_files.items() if content is not None]
    sources += [base / name for name in copied]
    return GraftPlan(
        base=base, head=head, num_layers=folder.num_layers, form=placed.form,
        kept=kept,
        added=tuple(i.name for i in placed.tensors if i.name not in checkpoint),
        replaced=tuple(i.name for i in placed.tensors if i.name in checkpoint),
        dropped=tuple(n for n in checkpoint.head_names if n not in new),
        kept_shards=kept_shards, written_shards=written, reemitted_shards=reemitted,
        removed_shards=tuple(n for n in checkpoint.shards if n not in {*kept_shards, *reemitted}),
        copied_files=copied, left_out_files=left_out,
        config=config, quant_file=quant_file, config_changes=tuple(changes),
        index_metadata=checkpoint.index_metadata,
        kept_bytes=sum(checkpoint.info(n).nbytes for n in kept),
        head_bytes=sum(info.nbytes for info in placed.tensors),
        base_fingerprint=fingerprint, head_metadata=folder.metadata, mismatches=tuple(mismatches),
        text_only=text, base_files=base_files, source_state=source_state(sources),
    )  # fmt: skip


def source_state(paths: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Size and time of change of each file, to notice a base that changes under a plan."""
    return tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _mismatch(base: Path, differences: list[str]) -> UserError:
    quantized = all(line.startswith("quantization") for line in differences)
    kind = "the same base in another quantization" if quantized else "another base"
    return UserError(
        f"a head trained on {base}",
        f"one for {kind}: {'; '.join(differences)}",
        "train a head on this base, or pass --allow-mismatch, knowing that fewer drafts may be "
        "accepted (the manifest and the model card will say so)",
    )


def _flattening(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """In one line, what making a config text-only changed."""
    if old is new:
        return []
    removed = sorted(old.keys() - new.keys())
    return [
        f"text_config made flat: architectures {old['architectures']} -> {new['architectures']}, "
        f"model_type {old['model_type']} -> {new['model_type']}; removed {', '.join(removed)}"
    ]


def _require_sound_head(checkpoint: Checkpoint, folder: HeadFolder) -> None:
    form = head_form(folder.names)
    if form != folder.form and not (folder.form == "bf16-per-expert" and form == "bf16-fused"):
        raise UserError(
            f"tensors in the form {folder.form} that {folder.folder}/head.json states",
            f"tensors in the form {form}",
            "write the head again",
        )
    problems = shape_problems(folder, checkpoint.text_config, folder.num_layers, folder.form)
    problems = problems or value_problems(folder)
    if problems:
        raise UserError(
            f"a complete, finite {folder.num_layers}-layer head for this base in {folder.folder}",
            f"{len(problems)} problems: {'; '.join(problems)}",
            "train or quantize the head again",
        )


def _plan_shards(
    checkpoint: Checkpoint, gone: set[str]
) -> tuple[tuple[str, ...], tuple[ShardPlan, ...]]:
    """Base shards that lose no tensor are kept whole; mixed ones are re-emitted without them."""
    kept, written = [], []
    for name, header in checkpoint.shards.items():
        trunk = tuple(i for n, i in header.items() if n not in gone)
        if len(trunk) == len(header):
            kept.append(name)
        elif trunk:
            written.append(ShardPlan(name=name, tensors=trunk))
    return tuple(kept), tuple(written)


def _head_shards(
    tensors: Iterable[PlannedTensor], taken: list[str], limit: int
) -> tuple[ShardPlan, ...]:
    groups: list[list[PlannedTensor]] = [[]]
    size = 0
    for info in tensors:
        if groups[-1] and size + info.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(info)
        size += info.nbytes
    stem, attempt = "model_mtp", 1
    while any(name.startswith(stem) for name in taken):
        attempt += 1
        stem = f"model_mtp{attempt}"
    if len(groups) == 1:
        return (ShardPlan(name=f"{stem}.safetensors", tensors=tuple(groups[0])),)
    return tuple(
        ShardPlan(
            name=f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", tensors=tuple(group)
        )
        for number, group in enumerate(groups, 1)
    )


def _quant_file_changes(checkpoint: Checkpoint, new: dict[str, Any] | None) -> list[str]:
    return differences(quantization_blocks(checkpoint)[1] or {}, new or {})


def _shard_paths(infos: Iterable[TensorInfo]) -> list[Path]:
    return list(dict.fromkeys(info.shard for info in infos))


def other_files(
    checkpoint: Checkpoint, unneeded: Iterable[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the files beside shards and configs: those to copy, those to leave out."""
    copied, left_out = [], []
    for path in sorted(checkpoint.folder.iterdir()):
        if path.name in BASE_FILES or path.name in checkpoint.shards:
            continue
        if not is_file_name(path.name):
            raise UserError(
                f"printable file names in {checkpoint.folder}", ascii(path.name), "rename that file"
            )
        unwanted = (
            path.name in OF_A_FOLDER
            or path.suffix.lower() in OTHER_WEIGHTS
            or path.name.endswith(".index.json")
        )
        unwanted = unwanted or path.name in unneeded
        if path.is_file() and not unwanted and not path.name.startswith("."):
            copied.append(path.name)
        else:
            left_out.append(path.name)
    return tuple(copied), tuple(left_out)
