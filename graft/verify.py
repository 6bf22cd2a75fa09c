"""Reopen a checkpoint and prove what a graft promises, from its bytes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from graft.errors import UserError
from graft.formats import head_form
from graft.head_check import is_fp8_block, shape_problems, value_problems
from graft.index import INDEX_NAME, index_of
from graft.layout import base_tensor_names, count_head_layers, count_key, declared_layers
from graft.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    file_digests,
    read_manifest,
    tensor_digests,
)
from graft.modules import is_multimodal
from graft.reader import HEAD_PREFIX, Checkpoint
from graft.schemes import precision_problems
from graft.text_only import VISION_PREFIXES

Status = Literal["pass", "fail", "skip"]
NO_HEAD = "no head, and none declared: a base"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One named check; `details` holds the problems, or why it was skipped."""

    name: str
    status: Status
    details: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was checked; `num_layers` and `form` describe the head that was found."""

    folder: Path
    checks: tuple[Check, ...]
    num_layers: int = 0
    form: str | None = None

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "fail" for check in self.checks)

    @property
    def failures(self) -> list[str]:
        """Every problem, with the name of its check."""
        return [f"{c.name}: {d}" for c in self.checks if c.status == "fail" for d in c.details]

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "folder": str(self.folder),
            "ok": self.ok,
            "num_layers": self.num_layers,
            "form": self.form,
            "checks": [asdict(check) for check in self.checks],
        }

    def as_text(self) -> str:
        """The report for people: one line a check, its problems below it (the first ten)."""
        lines = [f"{self.folder}: {self.num_layers} MTP layers, {self.form or 'no head'}"]
        for check in self.checks:
            lines.append(f"  {check.status}  {check.name}")
            lines += [f"        {detail}" for detail in check.details[:10]]
            if len(check.details) > 10:
                lines.append(f"        and {len(check.details) - 10} more")
        return "\n".join(lines)


def verify_graft(out: Path, base: Path | None = None) -> VerifyReport:
    """Check the checkpoint `out`, and against `base` where it is given.

    A broken `out` is a failed check; a missing `out` and a broken `base` are UserErrors.
    """
    out = Path(out)
    if not out.is_dir():
        raise UserError(
            f"a grafted checkpoint's folder at {out}",
            "a file" if out.exists() else "nothing",
            "give the folder that mtp graft wrote",
        )
    try:
        grafted = Checkpoint(out)
        grafted.require_supported()
        base_tensor_names(grafted)
        num_layers = count_head_layers(grafted.head_names)
    except UserError as error:
        return VerifyReport(
            folder=out,
            checks=(Check(name="files are sound", status="fail", details=(str(error),)),),
        )
    reference = Checkpoint(base) if base is not None else None
    steps: list[tuple[str, Callable[[], list[str] | str]]] = [
        ("files match the manifest", lambda: _file_problems(grafted)),
        ("index is true", lambda: _index_problems(grafted)),
        ("config agrees with the head", lambda: _count_problems(grafted, num_layers)),
        ("head is complete", lambda: _shape_problems(grafted, num_layers)),
        ("head is finite, scales positive", lambda: value_problems(grafted)),
        ("quantization config matches the tensors", lambda: precision_problems(grafted)),
        ("base tensors are byte-identical", lambda: _base_problems(grafted, reference)),
    ]
    checks = [Check(name="files are sound", status="pass")]
    for name, step in steps:
        try:
            found = step()
        except UserError as error:
            found = [str(error)]
        if isinstance(found, str):
            checks.append(Check(name=name, status="skip", details=(found,)))
        else:
            status: Status = "fail" if found else "pass"
            checks.append(Check(name=name, status=status, details=tuple(found)))
    form = head_form(grafted.head_names) if num_layers else None
    return VerifyReport(folder=out, checks=tuple(checks), num_layers=num_layers, form=form)


def _file_problems(grafted: Checkpoint) -> list[str] | str:
    if not (grafted.folder / MANIFEST_NAME).exists():
        return f"no {MANIFEST_NAME}: this folder was not made by mtp graft"
    manifest = read_manifest(grafted.folder)
    recorded = manifest["files"]
    present = [name for name in recorded if (grafted.folder / name).is_file()]
    problems = [f"{name} is missing" for name in recorded if name not in present]
    for name, digest in file_digests(grafted.folder, present).items():
        if not isinstance(recorded[name], dict) or digest != recorded[name].get("sha256"):
            problems.append(f"{name} has changed since the graft")
    problems += [f"{n} is not in the manifest" for n in grafted.shards if n not in recorded]
    tensors = manifest["head"]["tensor_sha256"]
    if set(tensors) != set(grafted.head_names):
        problems.append("the head's tensors are not those of the manifest")
    recorded_names = [name for name in grafted.head_names if name in tensors]
    problems += [
        f"{name} has changed since the graft"
        for name, digest in tensor_digests(grafted, recorded_names).items()
        if digest != tensors[name]
    ]
    return problems


def _index_problems(grafted: Checkpoint) -> list[str]:
    if grafted.weight_map is None:
        return [] if len(grafted.shards) == 1 else [f"{len(grafted.shards)} shards, no index"]
    wanted = index_of(grafted.infos(), grafted.index_metadata)
    problems = [
        f"{name} is in {shard}, the index says {grafted.weight_map.get(name)}"
        for name, shard in wanted["weight_map"].items()
        if grafted.weight_map.get(name) != shard
    ]
    size = grafted.index_metadata.get("total_size")
    if size != wanted["metadata"]["total_size"]:
        problems.append(f"{INDEX_NAME} total_size {size}, not {wanted['metadata']['total_size']}")
    problems += [f"{n} is not in the index: vLLM will not read it" for n in grafted.unindexed]
    return problems


def _count_problems(grafted: Checkpoint, num_layers: int) -> list[str] | str:
    key, declared = count_key(grafted.config), declared_layers(grafted.config)
    if not num_layers:
        stated = grafted.text_config.get(key) or grafted.config.get(key)
        return [f"declared {stated} MTP layers, found none"] if stated else NO_HEAD
    return [] if declared == num_layers else [f"{key} is {declared}, found {num_layers} layers"]


def _shape_problems(grafted: Checkpoint, num_layers: int) -> list[str] | str:
    if not num_layers and isinstance(_count_problems(grafted, 0), str):
        return NO_HEAD
    form = head_form(grafted.head_names)
    return shape_problems(
        grafted, grafted.text_config, max(num_layers, 1), form, fp8_block=is_fp8_block(grafted)
    )


def _base_problems(grafted: Checkpoint, base: Checkpoint | None) -> list[str] | str:
    if base is None:
        return "no base given to compare with"
    left_out: tuple[str, ...] = (HEAD_PREFIX,)
    if is_multimodal(base.config) and not is_multimodal(grafted.config):
        left_out = (HEAD_PREFIX, *VISION_PREFIXES)  # a text-only graft
    trunk = [name for name in base.names if not name.startswith(left_out)]
    ours = {name for name in grafted.names if not name.startswith(HEAD_PREFIX)}
    problems = [f"{name} is missing" for name in trunk if name not in ours]
    problems += [f"{name} is not in the base" for name in sorted(ours - set(trunk))]
    for name in trunk:
        if name not in ours:
            continue
        mine, theirs = grafted.info(name), base.info(name)
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            problems.append(f"{name} has another dtype or shape")
        elif mine.shard.samefile(theirs.shard) and mine.offset == theirs.offset:
            continue  # one file under two names
        elif grafted.digest(name) != base.digest(name):
            problems.append(f"{name} has other bytes")
    return problems
