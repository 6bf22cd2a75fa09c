"""`mtp release build`: a Hub-ready folder from a grafted checkpoint and its measurements.

Nothing is uploaded. Every number on the card is read from a report that a command wrote.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from graft.errors import UserError
from graft.staging import staged_folder
from graft.verify import verify_graft
from mtp import __version__
from mtp.release.card import render_card

SUMS = "SHA256SUMS"


def build_release(
    checkpoint: Path,
    out: Path,
    *,
    name: str,
    license_id: str,
    license_file: Path,
    evaluation: Path | None = None,
    served: Path | None = None,
    base_model: str | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Assemble the folder.

    Args:
        checkpoint: a grafted checkpoint; it must pass `verify_graft`.
        out: the folder to write.
        name: the model's name, also in the serve command.
        license_id: the Hub's licence identifier.
        license_file: becomes LICENSE.
        evaluation: report of `mtp eval` or `mtp quantize`.
        served: report of `mtp probe`.
        base_model: Hub id of the base, for the card.
        overwrite: replace an existing `out`.

    Returns:
        The files' names.

    Raises:
        UserError: the checkpoint does not verify, or neither report was given.
    """
    report = verify_graft(checkpoint)
    if not report.ok:
        raise UserError("a checkpoint that `mtp verify` passes", report.as_text(), "graft it again")
    if evaluation is None and served is None:
        raise UserError(
            "a measurement for the card",
            "neither --evaluation nor --served",
            "run `mtp eval --report` or `mtp probe --report` first",
        )
    card = render_card(
        checkpoint,
        name=name,
        license_id=license_id,
        base_model=base_model,
        evaluation=_read_report(evaluation),
        served=_read_report(served),
        tool=f"mtp-graft {__version__}",
    )
    sources = [path for path in (checkpoint, license_file) if path.is_dir()]
    with staged_folder(out, overwrite=overwrite, sources=sources) as staging:
        for path in sorted(checkpoint.iterdir()):
            if path.is_file():
                _link_or_copy(path, staging / path.name)
        (staging / "README.md").write_text(card)
        shutil.copyfile(license_file, staging / "LICENSE")
        names = sorted(path.name for path in staging.iterdir())
        lines = [f"{_sha256(staging / file)}  {file}\n" for file in names]
        (staging / SUMS).write_text("".join(lines))
    return [*names, SUMS]


def _read_report(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError("a report in JSON", f"{path}: {error}", "write it with --report") from error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
