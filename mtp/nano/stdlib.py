"""The running interpreter's standard library as text: real Python under a known licence.

It is on every machine that can run the demo, so nothing is downloaded and nothing is committed.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from graft.errors import UserError
from graft.staging import staged_folder

LICENCE = "PSF-2.0"
SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip",
    "turtledemo", "tkinter", "pydoc_data", "encodings", "distutils", "__phello__",
}  # fmt: skip
SMALLEST_FILE, LARGEST_FILE = 1_000, 120_000


@cache
def stdlib_root() -> Path:
    """Folder of the running interpreter's pure Python standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def code_files(folder: Path | None = None, *, limit_bytes: int | None = None) -> list[Path]:
    """The Python files to learn from, sorted by path.

    Args:
        folder: where to look; the standard library itself when None.
        limit_bytes: stop before the total size passes this.

    Raises:
        UserError: the folder holds no Python file.
    """
    root = folder or stdlib_root()
    chosen, total = [], 0
    for path in _python_files(root):
        size = path.stat().st_size
        if limit_bytes is not None and total + size > limit_bytes:
            break
        chosen.append(path)
        total += size
    if not chosen:
        raise UserError(
            "a folder with Python files", f"none in {root}", "name another folder of code"
        )
    return chosen


def copy_stdlib(out: Path, *, limit_bytes: int | None = None, overwrite: bool = False) -> int:
    """Copy the chosen modules, with a licence note, to a folder for `mtp data prepare --source`.

    Returns:
        How many modules were copied.
    """
    root = stdlib_root()
    files = code_files(limit_bytes=limit_bytes)
    with staged_folder(out, overwrite=overwrite) as staging:
        for path in files:
            target = staging / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        (staging / "LICENSE").write_text(_licence_note(root), encoding="utf-8")
    return len(files)


def _python_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        is_source = SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
        is_generated = path.name.startswith("_sysconfigdata")
        if not is_source or is_generated:
            continue
        if SMALLEST_FILE <= path.stat().st_size <= LARGEST_FILE and _is_utf8(path):
            yield path


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _licence_note(root: Path) -> str:
    note = (
        f"Modules of the standard library of Python {sys.version.split()[0]}.\n"
        "Copyright (c) Python Software Foundation. Licence: Python Software Foundation License\n"
        f"Version 2 (SPDX: {LICENCE}), https://docs.python.org/3/license.html\n"
    )
    full_text = root / "LICENSE.txt"
    return note + ("\n" + full_text.read_text(encoding="utf-8") if full_text.exists() else "")
