"""A plan in words and as JSON: what `mtp graft --dry-run` prints, and nothing is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.layout import unrouted_layers
from graft.place import Link, expected_storage, free_bytes
from graft.plan import GraftPlan

REPORT_SCHEMA = 1
SHOWN = 160  # characters of one config change; lists of modules are long


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What carrying out a plan will do to the disk; sizes in bytes."""

    plan: GraftPlan
    out: Path
    link: Link
    shards: tuple[tuple[str, str, int], ...]
    bytes_to_write: int
    bytes_shared: int
    free_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The report for `--dry-run --json`."""
        plan = self.plan
        return {
            "schema_version": REPORT_SCHEMA,
            "dry_run": True,
            "base": str(plan.base),
            "head": str(plan.head),
            "out": str(self.out),
            "link": self.link,
            "num_layers": plan.num_layers,
            "form": plan.form,
            "num_kept": len(plan.kept),
            "added": list(plan.added),
            "replaced": list(plan.replaced),
            "dropped": list(plan.dropped),
            "shards": [{"name": n, "action": a, "bytes": b} for n, a, b in self.shards],
            "bytes_to_write": self.bytes_to_write,
            "bytes_shared": self.bytes_shared,
            "free_bytes": self.free_bytes,
            "copied_files": list(plan.copied_files),
            "left_out": list(plan.left_out_files),
            "config_changes": list(plan.config_changes),
            "text_only": plan.text_only and plan.text_only.as_dict(),
            "allowed_mismatches": list(plan.mismatches),
        }

    def as_text(self) -> str:
        """The report for people."""
        lines = [f"{self.out}: planned, nothing written", *tensor_lines(self.plan)]
        for name, action, size in self.shards:
            lines.append(f"  {action:<9} {size / 1e9:10.3f} GB  {name}")
        lines.append(
            f"  to write: {self.bytes_to_write / 1e9:.3f} GB; shared with the base: "
            f"{self.bytes_shared / 1e9:.3f} GB; free: {self.free_bytes / 1e9:.3f} GB"
        )
        return "\n".join([*lines, *change_lines(self.plan)])


def report_plan(plan: GraftPlan, out: Path, link: Link) -> PlanReport:
    """Foresee what `write_graft` will do. `auto` is taken for a copy across file systems."""
    shards: list[tuple[str, str, int]] = []
    shared = copied = 0
    for name in plan.kept_shards:
        size = (plan.base / name).stat().st_size
        storage = expected_storage(plan.base / name, out, link)
        shards.append((name, storage, size))
        if storage == "copy":
            copied += size
        else:
            shared += size
    for shard in plan.written_shards:
        action = "re-emit" if shard.name in plan.reemitted_shards else "write"
        shards.append((shard.name, action, sum(info.nbytes for info in shard.tensors)))
    for name in plan.removed_shards:
        shards.append((name, "leave out", (plan.base / name).stat().st_size))
    return PlanReport(
        plan=plan, out=out, link=link, shards=tuple(shards),
        bytes_to_write=copied + bytes_written(plan), bytes_shared=shared,
        free_bytes=free_bytes(out),
    )  # fmt: skip


def bytes_written(plan: GraftPlan) -> int:
    """What a graft writes besides kept shards, with an estimate for headers, index and manifest."""
    tensors = [info for shard in plan.written_shards for info in shard.tensors]
    texts = 65536 + 150 * len(plan.kept) + 450 * len(tensors)
    files = sum((plan.base / name).stat().st_size for name in plan.copied_files)
    return sum(info.nbytes for info in tensors) + files + texts


def tensor_lines(plan: GraftPlan) -> list[str]:
    """What becomes of the tensors."""
    lines = [
        f"  head {plan.head}: {plan.num_layers} layers, {plan.form}, "
        f"{plan.head_bytes / 1e6:.1f} MB; {len(plan.added)} tensors added, "
        f"{len(plan.replaced)} replaced, {len(plan.dropped)} old ones dropped",
        f"  base {plan.base}: {len(plan.kept)} tensors kept ({plan.kept_bytes / 1e6:.1f} MB)",
    ]
    if text := plan.text_only:
        lines.append(
            f"  text-only: {len(text.dropped)} vision tensors and {len(text.left_out_files)} "
            f"preprocessor files left out, {text.saved_bytes} bytes saved"
            if text.dropped or text.left_out_files
            else "  text-only: the base has no vision tower, nothing to leave out"
        )
    return lines


def change_lines(plan: GraftPlan) -> list[str]:
    """Config changes, warnings, allowed mismatches and files left out, one a line."""
    lines = [f"  config: {change[:SHOWN]}" for change in plan.config_changes]
    if warning := unrouted_layers(plan.config.get("model_type"), plan.num_layers):
        lines.append(f"  warning: {warning}")
    lines += [f"  mismatch allowed: {difference}" for difference in plan.mismatches]
    return lines + [f"  left out: {name}" for name in plan.left_out_files]
