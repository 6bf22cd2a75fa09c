"""Take a head out of a checkpoint, into a head folder, as a start for training or another graft.

The head's tensors are copied as byte ranges, so nothing is rounded and memory stays small. The
head belongs to the base that it was trained on: a grafted checkpoint's manifest remembers that
one, any other checkpoint is taken to be its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.errors import UserError
from graft.formats import NVFP4_BLOCK, Form, head_form
from graft.head_check import is_fp8_block, shape_problems, value_problems
from graft.index import write_json
from graft.layout import count_head_layers, declared_layers
from graft.manifest import (
    HEAD_METADATA,
    HEAD_WEIGHTS,
    MANIFEST_NAME,
    base_fingerprint,
    head_metadata,
    read_manifest,
    tensor_digests,
)
from graft.reader import MAX_NAMED, Checkpoint
from graft.staging import staged_folder
from graft.writer import write_shard

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ExtractedHead:
    """A head folder that was written, and what lies in it."""

    out: Path
    checkpoint: Path
    num_layers: int
    form: Form
    num_tensors: int
    num_bytes: int
    grafted: bool

    def as_dict(self) -> dict[str, Any]:
        """The result for `--json`."""
        return {
            "schema_version": SCHEMA_VERSION, "out": str(self.out),
            "checkpoint": str(self.checkpoint), "num_layers": self.num_layers, "form": self.form,
            "num_tensors": self.num_tensors, "num_bytes": self.num_bytes, "grafted": self.grafted,
        }  # fmt: skip

    def as_text(self) -> str:
        """The result for people."""
        origin = "grafted by mtp-graft" if self.grafted else "the checkpoint's own"
        return (
            f"{self.out}: {self.num_layers} layers, {self.form}, {self.num_tensors} tensors, "
            f"{self.num_bytes / 1e6:.1f} MB, out of {self.checkpoint} ({origin})"
        )


def extract_head(
    checkpoint: Path, out: Path, *, overwrite: bool = False, tool: str | None = None
) -> ExtractedHead:
    """Write the head of `checkpoint` as the head folder `out`.

    Args:
        checkpoint: a Qwen3.5-like checkpoint with a head, grafted or native.
        out: the folder to make.
        overwrite: replace an existing `out`.
        tool: name and version of the tool, recorded in the provenance.

    Raises:
        UserError: no head, a head that is not complete or not finite, or one in a form that a
            head folder can't hold.
    """
    source = Checkpoint(checkpoint)
    source.require_supported()
    num_layers, form = _require_sound_head(source)
    grafted = (source.folder / MANIFEST_NAME).is_file()
    infos = [source.info(name) for name in source.head_names]
    metadata = _metadata(source, num_layers, form, grafted, tool)
    with staged_folder(
        out, overwrite=overwrite, sources=[source.folder], mark=HEAD_METADATA
    ) as staging:
        write_shard(staging / HEAD_WEIGHTS, infos)
        write_json(staging / HEAD_METADATA, metadata)
    return ExtractedHead(
        out=Path(out), checkpoint=source.folder, num_layers=num_layers, form=form,
        num_tensors=len(infos), num_bytes=sum(info.nbytes for info in infos), grafted=grafted,
    )  # fmt: skip


def _require_sound_head(source: Checkpoint) -> tuple[int, Form]:
    num_layers = count_head_layers(source.head_names)
    if not num_layers:
        raise UserError(
            f"a checkpoint with an MTP head at {source.folder}",
            f"{declared_layers(source.config) or 0} MTP layers declared, none there",
            "give a checkpoint that holds its head; `mtp inspect` shows what is in one",
        )
    if is_fp8_block(source):
        raise UserError(
            "a head in BF16 or NVFP4",
            f"one in FP8 blocks in {source.folder}",
            "extract it from the BF16 checkpoint",
        )
    form = head_form(source.head_names)
    problems = shape_problems(source, source.text_config, num_layers, form)
    problems = problems or value_problems(source)
    if problems:
        raise UserError(
            f"a complete, finite {num_layers}-layer head in {source.folder}",
            f"{len(problems)} problems: {'; '.join(problems[:MAX_NAMED])}",
            "restore the checkpoint; `mtp inspect --json` lists all of them",
        )
    return num_layers, form


def _metadata(
    source: Checkpoint, num_layers: int, form: Form, grafted: bool, tool: str | None
) -> dict[str, Any]:
    """head.json: what the graft remembered of the head, or what the checkpoint itself says."""
    head = read_manifest(source.folder)["head"] if grafted else {}
    remembered = ("base_fingerprint", "provenance", "quantization", "acceptance")
    if wrong := [key for key in remembered if not isinstance(head.get(key), dict | None)]:
        raise UserError(
            f"a manifest of mtp graft in {source.folder / MANIFEST_NAME}",
            f"no object under {', '.join(wrong)}",
            "restore that file",
        )
    if grafted and tensor_digests(source, source.head_names) != head["tensor_sha256"]:
        raise UserError(
            f"the head in {source.folder} that {MANIFEST_NAME} describes",
            "other bytes, of which its provenance and acceptance would not be true",
            f"restore the shard, or remove {MANIFEST_NAME} to take the head as unknown",
        )
    quantization = head.get("quantization")
    if form.startswith("nvfp4") and quantization is None:
        quantization = {"quant_algo": "NVFP4", "group_size": NVFP4_BLOCK}
    return head_metadata(
        num_layers=num_layers,
        form=form,
        text_config=source.text_config,
        base_fingerprint=head.get("base_fingerprint") or base_fingerprint(source),
        quantization=quantization if form.startswith("nvfp4") else None,
        acceptance=head.get("acceptance"),
        provenance={
            **(head.get("provenance") or {}),
            "extracted_from": {
                "folder": source.folder.resolve().name,
                "model_type": source.config.get("model_type"),
                "grafted": grafted,
                "tool": tool,
            },
        },
    )
