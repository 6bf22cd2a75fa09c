"""The running interpreter's standard library as text: real Python under a known licence.

It is on every machine that can run the demo, so nothing is downloaded and nothing is committed.
"""

from __future__ import annotations

import hashlib
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
DEFAULT_BYTES = 3_000_000
MARK = ".mtp-nano-code"  # tells a copy from somebody's own folder of code


@cache
def stdlib_root() -> Path:
    """Folder of the running interpreter's pure Python standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files(*, limit_bytes: int = DEFAULT_BYTES) -> list[Path]:
    """The standard-library modules to learn from, sorted by path.

    Args:
        limit_bytes: total size to stay under. The modules are drawn by the hash of their path,
            so that a small limit still takes from all of the library.
    """
    root, chosen, total = stdlib_root(), [], 0
    for path in sorted(code_files(root), key=lambda path: _path_hash(path, root)):
        total += path.stat().st_size
        if total > limit_bytes:
            break
        chosen.append(path)
    return sorted(chosen)


def code_files(folder: Path) -> list[Path]:
    """The Python files of a folder that are neither tests, generated, tiny nor huge, sorted.

    Raises:
        UserError: the folder holds none.
    """
    chosen = list(_python_files(folder))
    if not chosen:
        raise UserError(
            "a folder with Python files", f"none in {folder}", "name another folder of code"
        )
    return chosen


def copy_stdlib(out: Path, *, limit_bytes: int = DEFAULT_BYTES, overwrite: bool = False) -> int:
    """Copy the chosen modules, with a licence note, to a folder for `mtp data prepare --source`.

    Returns:
        How many modules were copied.
    """
    root = stdlib_root()
    files = stdlib_files(limit_bytes=limit_bytes)
    with staged_folder(out, overwrite=overwrite, mark=MARK) as staging:
        (staging / MARK).touch()
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


def _path_hash(path: Path, root: Path) -> str:
    return hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest()


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
