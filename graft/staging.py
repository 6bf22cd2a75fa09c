"""Build a folder aside and rename it into place, so that a kill leaves no half-written output.

A lock file next to the output keeps two writers apart. Because the lock is held, every staging
folder of that name that is still there belongs to a dead run and is removed; process ids alone
would lie across containers and after reuse.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from graft.errors import UserError
from graft.index import MAX_NAME_BYTES

LONGEST_ADDITION = 20  # of what is put around the output's name beside it: .NAME.staging-4194304
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def staged_folder(
    out: Path, *, overwrite: bool, sources: Iterable[Path] = (), mark: str | None = None
) -> Iterator[Path]:
    """Yield an empty hidden folder beside `out`; on success it becomes `out`, else it is removed.

    Args:
        out: the folder to make.
        overwrite: replace an existing `out`. The old one stays until the new one is complete.
        sources: folders that are read; `out` may not be one of them, inside one, or around one.
        mark: a file of every such output; a folder without it is somebody else's, never replaced.

    Raises:
        UserError: for an `out` that may not be written, or that another run is writing.
    """
    out = Path(out)
    sources = list(sources)
    check_output(out, overwrite=overwrite, sources=sources, mark=mark)
    parent, name = resolved(out.parent), out.name
    made_parents = [p for p in (parent, *parent.parents) if not p.exists()]
    finished = False
    try:
        _make_parent(parent)
        with locked(parent / f".{name}.lock", out):
            _clean_up(parent, name)
            # Another run may have made it between the first look and the lock.
            check_output(out, overwrite=overwrite, sources=sources, mark=mark)
            staging = parent / f".{name}.staging-{os.getpid()}"
            staging.mkdir()
            try:
                yield staging
                _sync_tree(staging)
                _put_in_place(staging, parent / name)
                for made in made_parents:
                    sync(made.parent)
                finished = True
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    finally:
        if not finished:
            with contextlib.suppress(OSError):
                for made in made_parents:
                    made.rmdir()


def check_output(
    out: Path, *, overwrite: bool, sources: Iterable[Path] = (), mark: str | None = None
) -> None:
    """Refuse an output folder that may not be written, before any work is done.

    Raises:
        UserError: `out` exists without `overwrite` or without `mark`, is a link or a file, holds
            the working directory, is equal to, inside or around one of `sources`, or holds a file
            that one of them links to (a hub cache's blobs).
    """
    out = Path(out)
    if out.name in ("", ".."):
        raise UserError("an output folder with a name", f"'{out}'", "name a new folder with --out")
    if len(os.fsencode(out.name)) > MAX_NAME_BYTES - LONGEST_ADDITION:
        raise UserError(
            f"an output folder's name of at most {MAX_NAME_BYTES - LONGEST_ADDITION} bytes",
            f"one of {len(os.fsencode(out.name))}",
            "choose a shorter --out",
        )
    real = resolved(out)
    for source in map(Path, sources):
        source_real = resolved(source)
        if real == source_real or source_real in real.parents or real in source_real.parents:
            raise UserError(
                f"an output folder apart from the input {source}",
                f"{out}, which is equal to it, inside it or around it",
                "choose another --out; inputs are never written to",
            )
        if linked := next((f for f in _link_targets(source_real) if real in f.parents), None):
            raise UserError(
                f"an output folder apart from the files of the input {source}",
                f"{out}, which holds {linked.name}, to which the input links",
                "choose another --out; inputs are never written to",
            )
    if out.is_symlink():
        raise UserError("a plain output folder", f"{out}, a link", "name the folder itself")
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError("an output folder", f"the file {out}", "choose another --out")
    if not overwrite:
        raise UserError(
            "an output folder that does not exist",
            f"{out}, which exists",
            "choose another --out, or pass --overwrite to replace it",
        )
    if mark is not None and not (out / mark).is_file() and any(out.iterdir()):
        raise UserError(
            f"a folder with {mark} to replace, as this command writes one",
            f"none in {out}, which is not empty",
            "choose another --out, or remove that folder yourself",
        )
    if real == Path.cwd() or real in Path.cwd().parents:
        raise UserError(
            "an output folder to replace",
            f"{out}, which holds the working directory",
            "choose another --out",
        )


def _link_targets(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (resolved(path) for path in folder.iterdir() if path.is_symlink())


def resolved(path: Path) -> Path:
    """Where `path` leads; UserError for links that lead in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError before Python 3.13
        raise UserError(
            "links that lead to a file or folder", f"{path}: {error}", "remove those links"
        ) from error


def _make_parent(parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"a folder {parent} that can be made", str(error), "choose another --out"
        ) from error


@contextlib.contextmanager
def locked(lock: Path, out: Path) -> Iterator[None]:
    """Hold a lock file that dies with the process; `out` is what it keeps others from writing.

    Raises:
        UserError: another process holds it, or there can be none.
    """
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(
                f"a folder {lock.parent} that can be written", str(error), "choose another --out"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UserError(
                f"no other run writing {out}", "one that holds its lock", "wait for it to end"
            ) from error
        except OSError as error:  # some network file systems
            os.close(descriptor)
            raise UserError(
                f"a file system under {lock.parent} that can lock files",
                str(error),
                "choose an --out on a local disk, and move the result",
            ) from error
        # The previous holder removes the file on its way out: a lock on a removed file is none.
        try:
            if lock.stat().st_ino == os.fstat(descriptor).st_ino:
                break
        except FileNotFoundError:
            pass
        os.close(descriptor)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _clean_up(parent: Path, name: str) -> None:
    """Remove what killed runs left; bring an old output back that was moved aside."""
    previous = parent / f".{name}.previous"
    if previous.exists() and not (parent / name).exists():
        previous.rename(parent / name)
    shutil.rmtree(previous, ignore_errors=True)
    prefix = f".{name}.staging-"
    for left_over in parent.iterdir():
        if left_over.name.startswith(prefix) and left_over.name[len(prefix) :].isdigit():
            if left_over.is_dir() and not left_over.is_symlink():
                shutil.rmtree(left_over)
            else:
                left_over.unlink()


def _put_in_place(staging: Path, out: Path) -> None:
    if not out.exists():
        staging.rename(out)
    elif not _exchange(staging, out):
        previous = out.parent / f".{out.name}.previous"
        out.rename(previous)
        staging.rename(out)
        shutil.rmtree(previous)
    sync(out.parent)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two folders in one step (Linux renameat2); False where the system can't."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and not rename(
        AT_FDCWD, os.fsencode(left), AT_FDCWD, os.fsencode(right), RENAME_EXCHANGE
    )


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root, name))
        sync(Path(root))


def sync(path: Path) -> None:
    """Put a file or folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
