"""Decide everything about a graft before the first byte is written. All refusals happen here.

A plan is made from headers, configs and the head's values alone. The writer only carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.config_patch import differences, nvfp4_blocks, with_ignore, with_layer_count
from graft.errors import UserError
from graft.formats import Form, describe_quantization, head_form, quantization_blocks
from graft.head_check import shape_problems, value_problems
from graft.ignore import derive_ignore, linear_modules
from graft.index import INDEX_NAME, TensorInfo
from graft.layout import base_tensor_names
from graft.manifest import (
    MANIFEST_NAME,
    HeadFolder,
    base_fingerprint,
    fingerprint_differences,
)
from graft.reader import PICKLE_SUFFIXES, Checkpoint
from graft.staging import check_output

QUANT_FILE = "hf_quant_config.json"
HEAD_SHARD_BYTES = 5_000_000_000
OTHER_WEIGHTS = (*PICKLE_SUFFIXES, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx")
REWRITTEN = ("config.json", QUANT_FILE, INDEX_NAME, MANIFEST_NAME, "SHA256SUMS")


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One shard to write: `tensors` say where each tensor's bytes come from."""

    name: str
    tensors: tuple[TensorInfo, ...]


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
    source_state: tuple[tuple[str, int, int], ...]


def plan_graft(
    base: Path,
    head: Path,
    *,
    out: Path | None = None,
    allow_mismatch: bool = False,
    head_shard_bytes: int = HEAD_SHARD_BYTES,
) -> GraftPlan:
    """Plan a graft of the head folder `head` onto the checkpoint `base`.

    Args:
        base: a Qwen3.5-like checkpoint; never written to.
        head: a head folder (`head.json`, `mtp.safetensors`).
        out: where the result will go; refused here if it would touch an input.
        allow_mismatch: graft a head that was made for another base; recorded in the manifest.
        head_shard_bytes: at most this many tensor bytes in one head shard.

    Raises:
        UserError: for every reason not to do it.
    """
    base, head = Path(base), Path(head)
    if out is not None:
        check_output(out, overwrite=True, sources=[base, head])
    checkpoint = Checkpoint(base)
    checkpoint.require_supported()
    base_tensor_names(checkpoint)
    folder = HeadFolder(head)
    fingerprint = base_fingerprint(checkpoint)
    # Before completeness: a head of another base has wrong shapes, and this is the better reason.
    mismatches = fingerprint_differences(folder.metadata["base_fingerprint"], fingerprint)
    if mismatches and not allow_mismatch:
        raise UserError(
            f"a head trained on {base}",
            f"one for another base: {'; '.join(mismatches)}",
            "train a head on this base, or pass --allow-mismatch",
        )
    _require_sound_head(checkpoint, folder)

    new, old = folder.names, checkpoint.head_names
    dropped_names = set(old)
    kept = tuple(name for name in checkpoint.names if name not in dropped_names)
    kept_shards, written = _plan_shards(checkpoint)
    written += _head_shards(folder, [*kept_shards, *(s.name for s in written)], head_shard_bytes)
    config, quant_file = _plan_configs(checkpoint, folder, kept)
    changes = differences(checkpoint.config, config)
    changes += [f"{QUANT_FILE} {c}" for c in _quant_file_changes(checkpoint, quant_file)]
    copied, left_out = _other_files(checkpoint)
    sources = [*(base / name for name in checkpoint.shards), *_shard_paths(folder.infos())]
    return GraftPlan(
        base=base, head=head, num_layers=folder.num_layers, form=folder.form,
        kept=kept,
        added=tuple(n for n in new if n not in checkpoint),
        replaced=tuple(n for n in new if n in checkpoint),
        dropped=tuple(n for n in old if n not in folder),
        kept_shards=kept_shards, written_shards=written,
        copied_files=copied, left_out_files=left_out,
        config=config, quant_file=quant_file, config_changes=tuple(changes),
        index_metadata=checkpoint.index_metadata,
        kept_bytes=sum(checkpoint.info(n).nbytes for n in kept),
        head_bytes=sum(info.nbytes for info in folder.infos()),
        base_fingerprint=fingerprint, head_metadata=folder.metadata, mismatches=tuple(mismatches),
        source_state=source_state(sources),
    )  # fmt: skip


def source_state(paths: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Size and time of change of each file, to notice a base that changes under a plan."""
    return tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths)


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


def _plan_shards(checkpoint: Checkpoint) -> tuple[tuple[str, ...], tuple[ShardPlan, ...]]:
    """Base shards without head tensors are kept whole; mixed ones are re-emitted without them."""
    kept, written = [], []
    head_names = set(checkpoint.head_names)
    for name, header in checkpoint.shards.items():
        trunk = tuple(i for n, i in header.items() if n not in head_names)
        if len(trunk) == len(header):
            kept.append(name)
        elif trunk:
            written.append(ShardPlan(name=name, tensors=trunk))
    return tuple(kept), tuple(written)


def _head_shards(folder: HeadFolder, taken: list[str], limit: int) -> tuple[ShardPlan, ...]:
    groups: list[list[TensorInfo]] = [[]]
    size = 0
    for info in folder.infos():
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


def _plan_configs(
    checkpoint: Checkpoint, folder: HeadFolder, kept: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and hf_quant_config.json after the graft."""
    config = with_layer_count(checkpoint.config, folder.num_layers)
    block, file = quantization_blocks(checkpoint)
    nvfp4_head = folder.form == "nvfp4-modelopt"
    if not block and not file and not nvfp4_head:
        return config, None
    stated = describe_quantization(checkpoint)
    if stated and (stated["method"], stated["algo"]) != ("modelopt", "NVFP4"):
        raise UserError(
            "an unquantized or modelopt NVFP4 base",
            f"{stated['method']} {stated['algo']} in {checkpoint.folder}",
            "use the BF16 base: this version cannot state a head's precision in that format",
        )
    multimodal = is_multimodal(checkpoint.config)
    modules = linear_modules([*map(checkpoint.info, kept), *folder.infos()], multimodal)
    existing = (block or {}).get("ignore") or (
        (file or {}).get("quantization", {}).get("exclude_modules", [])
    )
    ignore = derive_ignore(modules, existing, multimodal)
    if stated:
        new_block, new_file = with_ignore(block, file, ignore)
    else:
        producer = (folder.metadata["quantization"] or {}).get("producer", {"name": "modelopt"})
        new_block, new_file = nvfp4_blocks(ignore, producer)
    if new_block:
        place = config if "quantization_config" in checkpoint.config or not block else None
        (config["text_config"] if place is None else place)["quantization_config"] = new_block
    return config, new_file


def is_multimodal(config: dict[str, Any]) -> bool:
    """Whether vLLM builds the class with a vision tower, which spells module names differently."""
    return any("ForConditionalGeneration" in name for name in config.get("architectures") or [])


def _quant_file_changes(checkpoint: Checkpoint, new: dict[str, Any] | None) -> list[str]:
    return differences(quantization_blocks(checkpoint)[1] or {}, new or {})


def _shard_paths(infos: Iterable[TensorInfo]) -> list[Path]:
    return list(dict.fromkeys(info.shard for info in infos))


def _other_files(checkpoint: Checkpoint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    copied, left_out = [], []
    for path in sorted(checkpoint.folder.iterdir()):
        if path.name in REWRITTEN or path.name in checkpoint.shards:
            continue
        unwanted = path.suffix in OTHER_WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not unwanted and not path.name.startswith("."):
            copied.append(path.name)
        else:
            left_out.append(path.name)
    return tuple(copied), tuple(left_out)
