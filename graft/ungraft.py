"""Take a graft back: the base as it was, byte for byte, as far as its bytes still exist.

Where the graft only added, everything is here: the base's shards and small files lie in the
grafted folder untouched, and the manifest holds the files that the graft edited. Where it dropped
an old head, re-emitted a shard or left the vision tower out, those bytes are nowhere else than in
the base, which then has to be given; it is believed only as far as the manifest's digests prove it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.errors import UserError
from graft.index import is_file_name
from graft.manifest import MANIFEST_NAME, file_digests, read_manifest
from graft.place import FULL, Link, copy_file, no_space, require_space, share_files
from graft.plan import BASE_FILES, OTHER_WEIGHTS
from graft.reader import MAX_NAMED
from graft.record import unpacked
from graft.staging import check_output, staged_folder

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class UngraftPlan:
    """Which file of the base comes from where. Nothing has been written yet.

    Attributes:
        kept: files that the graft took over unchanged; they come from `checkpoint`.
        edited: files that the graft edited, as they were.
        from_base: files and folders that only `base` still has.
        not_restored: what the graft left out and nobody reads; it needs `base`.
        left_behind: files that were put into `checkpoint` after the graft.
    """

    checkpoint: Path
    base: Path | None
    kept: tuple[str, ...]
    edited: dict[str, bytes]
    from_base: tuple[str, ...]
    not_restored: tuple[str, ...]
    left_behind: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class UngraftResult:
    """A base that was restored, and how each linked or copied file of it is stored."""

    out: Path
    plan: UngraftPlan
    storage: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The result for `--json`."""
        plan = self.plan
        return {
            "schema_version": SCHEMA_VERSION,
            "out": str(self.out),
            "checkpoint": str(plan.checkpoint),
            "base": None if plan.base is None else str(plan.base),
            "complete": not plan.not_restored,
            "from_checkpoint": list(plan.kept),
            "from_manifest": sorted(plan.edited),
            "from_base": list(plan.from_base),
            "not_restored": list(plan.not_restored),
            "left_behind": list(plan.left_behind),
            "storage": self.storage,
        }

    def as_text(self) -> str:
        """The result for people: where the files came from, and what is missing."""
        plan = self.plan
        lines = [
            f"{self.out}: the base of {plan.checkpoint}",
            f"  {len(plan.kept)} files as the graft took them over, "
            f"{len(plan.edited)} that it edited, {len(plan.from_base)} only the base had",
        ]
        lines += [
            f"  not restored: {name} (the graft left it out; --base BASE brings it back)"
            for name in plan.not_restored
        ]
        lines += [f"  left behind: {name} (put there after the graft)" for name in plan.left_behind]
        if "hard-link" in self.storage.values():
            lines.append("  hard-linked files are one file in both folders: do not edit in place")
        return "\n".join(lines)


def plan_ungraft(checkpoint: Path, base: Path | None = None) -> UngraftPlan:
    """Find every file of the base, and prove it, before anything is written.

    Args:
        checkpoint: a folder that `mtp graft` wrote.
        base: the checkpoint that was grafted onto; needed where the graft did not only add.

    Raises:
        UserError: no manifest; files that changed since the graft; bytes that only the base has
            while none is given; a base that is not the one.
    """
    checkpoint, base = Path(checkpoint), None if base is None else Path(base)
    if not (checkpoint / MANIFEST_NAME).is_file():
        raise UserError(
            f"a folder that mtp graft wrote at {checkpoint}",
            f"no {MANIFEST_NAME} in it" if checkpoint.is_dir() else "no such folder",
            "give the grafted checkpoint",
        )
    manifest = _checked(read_manifest(checkpoint), checkpoint)
    _require_unchanged(checkpoint, manifest["files"])
    edited = {name: unpacked(value, name) for name, value in manifest["base_files"].items()}
    lost, left_out = manifest["base_sha256"], manifest["changes"]["left_out"]
    if base is None and lost:
        raise UserError(
            "--base, since this graft did not only add",
            f"{len(lost)} files of the base that are not in {checkpoint}: "
            f"{', '.join(sorted(lost)[:MAX_NAMED])}",
            "pass --base BASE, the checkpoint that was grafted onto",
        )
    wanted = list(dict.fromkeys([*lost, *left_out]))
    if base is not None:
        _require_the_base(base, edited, lost)
    present = [name for name in wanted if base is not None and (base / name).exists()]
    known = {*manifest["files"], MANIFEST_NAME}
    return UngraftPlan(
        checkpoint=checkpoint,
        base=base,
        kept=tuple(n for n, f in manifest["files"].items() if f["storage"] != "written"),
        edited={name: content for name, content in edited.items() if content is not None},
        from_base=tuple(present),
        not_restored=tuple(name for name in wanted if name not in present),
        left_behind=tuple(sorted(p.name for p in checkpoint.iterdir() if p.name not in known)),
    )


def write_ungraft(
    plan: UngraftPlan, out: Path, *, overwrite: bool = False, link: Link = "auto"
) -> UngraftResult:
    """Write the base to `out`.

    Args:
        plan: from `plan_ungraft`.
        out: the folder to make.
        overwrite: replace an existing `out`.
        link: how weight files are placed; see `graft/place.py`. Small files are copied.

    Raises:
        UserError: if `out` may not be written or its disk is too small.
    """
    sources = [plan.checkpoint] + ([plan.base] if plan.base else [])
    mark = "config.json"
    check_output(out, overwrite=overwrite, sources=sources, mark=mark)
    if lost := [name for name in plan.not_restored if (Path(out) / name).exists()]:
        raise UserError(
            f"an --out without files that only the base has, such as {lost[0]}",
            f"{len(lost)} of them in {out}, which --overwrite would lose",
            "pass --base BASE as well and another --out, or keep that folder: it is the base",
        )
    try:
        with staged_folder(out, overwrite=overwrite, sources=sources, mark=mark) as staging:
            storage = _place(plan, staging, link)
            for name, content in plan.edited.items():
                with (staging / name).open("xb") as file:  # never through a link
                    file.write(content)
    except OSError as error:
        if error.errno in FULL:
            raise no_space(out, "enough", "a disk that another writer filled meanwhile") from error
        raise
    return UngraftResult(out=Path(out), plan=plan, storage=storage)


def _place(plan: UngraftPlan, staging: Path, link: Link) -> dict[str, str]:
    """Link or copy what the graft took over and what the base supplies; how each is stored."""
    pairs = [(plan.checkpoint / name, staging / name) for name in plan.kept]
    if plan.base is not None:
        pairs += [(plan.base / name, staging / name) for name in plan.from_base]
    weights = [pair for pair in pairs if pair[0].suffix in OTHER_WEIGHTS and pair[0].is_file()]
    storage: dict[str, str] = dict(share_files(weights, link))
    left = [pair for pair in pairs if pair[1].name not in storage]
    require_space(staging, sum(_num_bytes(source) for source, _ in left))
    for source, target in left:
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            copy_file(source, target)
        storage[target.name] = "copy"
    return storage


def _checked(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The manifest, if every name in it is a name in the folder: it says what is written where."""
    changes, files = manifest.get("changes"), manifest["files"]
    edited, lost = manifest.get("base_files"), manifest.get("base_sha256")
    left_out = changes.get("left_out") if isinstance(changes, dict) else None
    sound = all(isinstance(f, dict) and isinstance(f.get("storage"), str) for f in files.values())
    if not isinstance(edited, dict) or not isinstance(lost, dict) or not isinstance(left_out, list):
        sound = False
    elif sound:
        kept = [name for name, file in files.items() if file["storage"] != "written"]
        names: list[Any] = [*kept, *edited, *dict.fromkeys(map(str, (*lost, *left_out)))]
        sound = len(names) == len(set(names)) and all(map(is_file_name, (*files, *names)))
        sound = sound and edited.keys() <= set(BASE_FILES)
    if not sound:
        raise UserError(
            f"a manifest of mtp graft in {folder / MANIFEST_NAME}",
            "one with missing parts, or with names that no folder can hold",
            "graft again with this version",
        )
    return manifest


def _require_unchanged(checkpoint: Path, files: dict[str, Any]) -> None:
    present = [name for name in files if (checkpoint / name).is_file()]
    digests = file_digests(checkpoint, present)
    wrong = [f"{name} is gone" for name in files if name not in digests]
    wrong += [f"{n} has changed" for n in present if digests[n] != files[n].get("sha256")]
    if wrong:
        raise UserError(
            f"the files of {checkpoint} as mtp graft wrote them",
            f"{len(wrong)} that are not: {', '.join(wrong[:MAX_NAMED])}",
            "keep your changes elsewhere and restore these files, or graft again",
        )


def _require_the_base(base: Path, edited: dict[str, bytes | None], lost: dict[str, str]) -> None:
    if not base.is_dir():
        raise UserError(f"the base's folder at {base}", "no such folder", "correct --base")
    wrong = []
    for name, content in edited.items():
        there = (base / name).read_bytes() if (base / name).is_file() else None
        if there != content:
            wrong.append(name)
    present = [name for name in lost if (base / name).is_file()]
    digests = file_digests(base, present)
    wrong += [f"{name} (absent)" for name in lost if name not in digests]
    wrong += [name for name in present if digests[name] != lost[name]]
    if wrong:
        raise UserError(
            "the base that was grafted onto, as it was then",
            f"{base}, where {', '.join(wrong[:MAX_NAMED])} differ",
            "give the right --base",
        )


def _num_bytes(path: Path) -> int:
    if path.is_dir():
        return sum(_num_bytes(inner) for inner in path.iterdir())
    return path.stat().st_size
