"""What both kinds of release folder need: a licence, and the list of digests."""

from __future__ import annotations

from pathlib import Path

from graft.errors import UserError
from graft.manifest import file_digests

SUMS = "SHA256SUMS"


def require_licence(path: Path) -> None:
    """Refuse a licence file that is not there.

    Raises:
        UserError: no such file.
    """
    if not path.is_file():
        raise UserError("a licence file", f"{path}: no such file", "name one with --license-file")


def write_sums(folder: Path) -> list[str]:
    """Write SHA256SUMS over every file of a folder; return all names, its own last."""
    names = sorted(path.name for path in folder.iterdir())
    lines = [f"{digest}  {name}\n" for name, digest in file_digests(folder, names).items()]
    (folder / SUMS).write_text("".join(lines))
    return [*names, SUMS]
