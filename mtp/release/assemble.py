"""`mtp release build`: a Hub-ready folder from a grafted checkpoint and its measurements.

Nothing is uploaded. Every number on the card is read from a report that a command wrote.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from graft.errors import UserError
from graft.index import write_json
from graft.manifest import MANIFEST_NAME, read_manifest
from graft.staging import staged_folder
from graft.verify import verify_graft
from mtp import __version__
from mtp.release.card import render_card
from mtp.release.files import SUMS, require_licence, write_sums
from mtp.reports import read_report

WRITTEN = ("README.md", "LICENSE", SUMS)  # ours, whatever the base had under these names


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
    require_licence(license_file)
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
        evaluation=None if evaluation is None else read_report(evaluation, "num_prompts", "before"),
        served=None if served is None else read_report(served, "rows"),
        tool=f"mtp-graft {__version__}",
    )
    with staged_folder(
        out, overwrite=overwrite, sources=[checkpoint], mark="config.json"
    ) as staging:
        return _fill(staging, checkpoint, card, license_file)


def _fill(folder: Path, checkpoint: Path, card: str, license_file: Path) -> list[str]:
    """The checkpoint's files, card, licence, manifest and digests; their names."""
    for path in sorted(checkpoint.iterdir()):
        # Never linked: what is written anew here would be written through the link.
        if path.is_file() and path.name not in (*WRITTEN, MANIFEST_NAME):
            _link_or_copy(path, folder / path.name)
    (folder / "README.md").write_text(card)
    shutil.copyfile(license_file, folder / "LICENSE")
    manifest = read_manifest(checkpoint)
    manifest["files"] = {n: f for n, f in manifest["files"].items() if n not in WRITTEN}
    write_json(folder / MANIFEST_NAME, manifest)
    return write_sums(folder)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)
