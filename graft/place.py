"""Put files into an output folder without their bytes passing through Python.

Three ways, cheapest first. A hard link costs nothing, but both names are one file: editing one in
place edits both. A reflink (FICLONE) shares blocks until one side changes; btrfs, XFS and a few
others can. A copy runs inside the kernel (`copy_file_range`), which may itself share blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, get_args

from graft.errors import UserError

Link = Literal["auto", "hard", "reflink", "copy"]
Storage = Literal["hard-link", "reflink", "copy"]
LINKS: tuple[Link, ...] = get_args(Link)
FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
CHUNK_BYTES = 1024 * 1024
RANGE_BYTES = 256 * 1024 * 1024  # of one kernel copy, so that Ctrl-C is answered
# What copy_file_range says where it can't: other file system, odd file, old kernel.
NO_RANGE_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
FULL = (errno.ENOSPC, errno.EDQUOT)


def share_files(files: Iterable[tuple[Path, Path]], link: Link) -> dict[str, Storage]:
    """Link the files that can be linked; nothing is written for the others.

    Args:
        files: source and target of each. Sources may be symbolic links (the hub cache's are).
        link: `auto` tries a hard link, then a reflink; `copy` links nothing.

    Returns:
        By the target's name, how each linked file is stored.

    Raises:
        UserError: where `hard` or `reflink` is demanded and impossible.
    """
    storage: dict[str, Storage] = {}
    for source, target in files:
        real, failure = source.resolve(), None
        for kind, share in MEANS[link]:
            failure = share(real, target)
            if failure is None:
                storage[target.name] = kind
                break
        if failure and link != "auto":
            raise UserError(
                f"a file system that can make a {kind} of {real} in {target.parent.parent}",
                failure,
                "pass --link auto, or --link copy",
            )
    return storage


def _hard_link(source: Path, target: Path) -> str | None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _reflink(source: Path, target: Path) -> str | None:
    with source.open("rb") as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        except OSError as error:
            target.unlink()
            return error.strerror or str(error)
    return None


MEANS: dict[Link, tuple[tuple[Storage, Callable[[Path, Path], str | None]], ...]] = {
    "auto": (("hard-link", _hard_link), ("reflink", _reflink)),
    "hard": (("hard-link", _hard_link),),
    "reflink": (("reflink", _reflink),),
    "copy": (),
}


def copy_file(source: Path, target: Path) -> None:
    """Copy a whole file to a name that must be free."""
    with source.open("rb") as old, target.open("xb") as new:
        copied = copy_range(old.fileno(), 0, new.fileno(), os.fstat(old.fileno()).st_size)
        if not copied:
            raise changed(source)


def copy_range(source: int, offset: int, target: int, nbytes: int) -> bool:
    """Append bytes of one file to another at its current position, in the kernel where it can.

    Args:
        source: descriptor to read.
        offset: first byte to copy.
        target: descriptor to write; its position moves on.
        nbytes: how many.

    Returns:
        False if `source` ended early.
    """
    left = nbytes
    while left:
        try:
            count = os.copy_file_range(source, target, min(left, RANGE_BYTES), offset)
        except OSError as error:
            if error.errno not in NO_RANGE_COPY:
                raise
            return _copy_through_memory(source, offset, target, left)
        if not count:
            # Also what some file systems (FUSE, procfs) answer when they can't.
            return _copy_through_memory(source, offset, target, left)
        offset += count
        left -= count
    return True


def _copy_through_memory(source: int, offset: int, target: int, nbytes: int) -> bool:
    left, buffer = nbytes, memoryview(bytearray(min(nbytes, CHUNK_BYTES)))
    while left:
        count = os.preadv(source, [buffer[: min(left, len(buffer))]], offset)
        if not count:
            return False
        offset += count
        left -= count
        written = 0
        while written < count:
            written += os.write(target, buffer[written:count])
    return True


def changed(path: Path) -> UserError:
    """The error for an input that is no longer what was planned with."""
    return UserError(
        f"{path} as it was when the graft was planned", "a changed file", "run the graft again"
    )


def require_space(folder: Path, nbytes: int) -> None:
    """Refuse to start what the file system of `folder` can't hold.

    Raises:
        UserError: naming both numbers.
    """
    if nbytes > (free := free_bytes(folder)):
        raise no_space(folder, f"{nbytes / 1e9:.3f} GB", f"{free / 1e9:.3f} GB free")


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write where `folder` is, or will be made."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    state = os.statvfs(existing)
    return state.f_bavail * state.f_frsize


def no_space(folder: Path, wanted: str, found: str) -> UserError:
    """The error for a file system without room."""
    return UserError(
        f"{wanted} of free space on the file system of {folder.absolute()}",
        found,
        "free some, choose another --out, or let --link auto share the base's shards",
    )


def expected_storage(source: Path, folder: Path, link: Link) -> Storage:
    """How a file will probably be stored in `folder`, said without trying it.

    `auto` can tell hard links from copies (one file system or two), but not foresee a reflink.
    """
    if link in ("copy", "reflink"):
        return link
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    same = source.resolve().stat().st_dev == existing.stat().st_dev
    return "hard-link" if same or link == "hard" else "copy"
