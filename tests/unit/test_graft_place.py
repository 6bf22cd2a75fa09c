"""Placing files: every kind of link, every way to fail, and never a byte through a link."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from tiny import write_base, write_tiny_head

from graft import place, writer
from graft.errors import UserError
from graft.manifest import file_digests
from graft.place import copy_file, expected_storage, share_files
from graft.plan import plan_graft
from graft.verify import verify_graft
from graft.writer import write_graft

CONTENT = bytes(range(256)) * 12_289  # no multiple of any block


@pytest.fixture
def inputs(tmp_path):
    base = write_base(tmp_path / "base", declared=1, head_layers=1, head_place="mixed")
    return base, write_tiny_head(tmp_path / "head", base)


@pytest.fixture
def other_disk():
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("no second file system at /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared))
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def mounted(folder, options):
    """A small file system of its own; skips where this user may not mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def contents(folder):
    return file_digests(folder, sorted(p.name for p in folder.iterdir()))


def storage_of(result):
    return {result.manifest["files"][name]["storage"] for name in result.plan.kept_shards}


@pytest.mark.parametrize("broken", [None, errno.EXDEV, errno.ENOSYS, "nothing copied"])
def test_a_copy_is_exact_in_the_kernel_and_outside(tmp_path, monkeypatch, broken):
    def cannot(*arguments):
        if broken == "nothing copied":
            return 0
        raise OSError(broken, os.strerror(broken))

    if broken:
        monkeypatch.setattr(os, "copy_file_range", cannot)
    (tmp_path / "old").write_bytes(CONTENT)
    copy_file(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == CONTENT
    assert not (tmp_path / "new").samefile(tmp_path / "old")
    with pytest.raises(FileExistsError):
        copy_file(tmp_path / "old", tmp_path / "new")


def test_a_source_that_shrinks_is_noticed(tmp_path):
    (tmp_path / "old").write_bytes(b"short")
    with (tmp_path / "old").open("rb") as old, (tmp_path / "new").open("wb") as new:
        assert not place.copy_range(old.fileno(), 0, new.fileno(), 6)
    with (tmp_path / "old").open("rb") as old, (tmp_path / "new").open("wb") as new:
        assert place.copy_range(old.fileno(), 1, new.fileno(), 4)
    assert (tmp_path / "new").read_bytes() == b"hort"


def test_reflink_where_possible_else_a_reason(tmp_path, monkeypatch):
    (tmp_path / "old").write_bytes(CONTENT)
    pair = [(tmp_path / "old", tmp_path / "folder" / "new")]
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(place.fcntl, "ioctl", lambda *arguments: 0)
    assert share_files(pair, "reflink") == {"new": "reflink"}
    (tmp_path / "folder" / "new").unlink()

    def refuse(*arguments):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(place.fcntl, "ioctl", refuse)
    with pytest.raises(UserError, match=r"reflink of .*old.*not supported.*--link auto"):
        share_files(pair, "reflink")
    assert list((tmp_path / "folder").iterdir()) == []


def test_auto_tries_a_hard_link_then_a_reflink_then_leaves_it_to_a_copy(inputs, monkeypatch):
    base, head = inputs
    tried = []

    def link(source, target, **keywords):
        tried.append("hard")
        raise OSError(errno.EPERM, "Operation not permitted")

    def clone(*arguments):
        tried.append("reflink")
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(place.fcntl, "ioctl", clone)
    result = write_graft(plan_graft(base, head), base.parent / "out")
    assert tried == ["hard", "reflink"] * 2 and storage_of(result) == {"copy"}
    assert verify_graft(result.out, base).ok


def test_across_file_systems(inputs, other_disk):
    base, head = inputs
    plan, before = plan_graft(base, head), contents(base)
    assert expected_storage(base / "config.json", other_disk / "out", "auto") == "copy"
    for link in ("hard", "reflink"):
        with pytest.raises(UserError, match="--link auto, or --link copy"):
            write_graft(plan, other_disk / "out", link=link)
        assert list(other_disk.iterdir()) == []
    for link in ("auto", "copy"):
        result = write_graft(plan, other_disk / "out", link=link, overwrite=True)
        assert storage_of(result) == {"copy"} and verify_graft(result.out, base).ok
    assert contents(base) == before


def test_a_full_disk_is_refused_before_the_first_byte(inputs, monkeypatch):
    base, head = inputs
    plan = plan_graft(base, head)
    monkeypatch.setattr(place, "free_bytes", lambda folder: 1000)
    monkeypatch.setattr(writer, "write_shard", lambda *arguments: pytest.fail("wrote"))
    for link in ("hard", "copy"):
        with pytest.raises(UserError, match=r"GB of free space .*found 0\.000 GB free"):
            write_graft(plan, base.parent / "out", link=link)
    assert sorted(p.name for p in base.parent.iterdir()) == ["base", "head"]


def test_a_disk_that_fills_meanwhile_leaves_nothing(inputs, monkeypatch):
    base, head = inputs

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "copy_range", full)
    with pytest.raises(UserError, match="another writer filled"):
        write_graft(plan_graft(base, head), base.parent / "out")
    assert sorted(p.name for p in base.parent.iterdir()) == ["base", "head"]


def test_a_really_full_and_a_really_read_only_disk(inputs, monkeypatch):
    base, head = inputs
    plan = plan_graft(base, head)
    with mounted(base.parent / "small", "size=200k") as disk:
        with pytest.raises(UserError, match="free space"):
            write_graft(plan, disk / "out")
        with monkeypatch.context() as patch:  # and if the estimate were wrong
            patch.setattr(writer, "require_space", lambda *arguments: None)
            with pytest.raises(UserError, match="another writer filled"):
                write_graft(plan, disk / "out")
        assert list(disk.iterdir()) == []
    with (
        mounted(base.parent / "locked", "ro") as disk,
        pytest.raises(UserError, match="that can be written"),
    ):
        write_graft(plan, disk / "out")


def test_what_cannot_be_read_is_named(monkeypatch):
    """Under another user where the tests run as root, whom no permission stops."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    base = write_base(folder / "base")
    head = write_tiny_head(folder / "head", base)
    for path in head.iterdir():
        path.chmod(0o644)
    shard = base / "model-00002-of-00003.safetensors"
    user = os.geteuid()
    try:
        for path in (shard, base / "config.json", head / "mtp.safetensors"):
            for other in base.iterdir():
                other.chmod(0o644)
            path.chmod(0)
            if user == 0:
                os.seteuid(65534)
            try:
                with pytest.raises(UserError, match=path.name):
                    plan_graft(base, head)
            finally:
                os.seteuid(user)
            path.chmod(0o644)
    finally:
        shutil.rmtree(folder)


def test_nothing_is_written_through_a_link(tmp_path):
    """A base as the hub cache has it: every file of the snapshot a link into blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    write_base(blobs, declared=1, head_layers=1, head_place="mixed")
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    (blobs / "model_mtp.safetensors").write_text("not ours")
    (snapshot / "model_mtp.safetensors").symlink_to(blobs / "model_mtp.safetensors")
    before, inodes = contents(blobs), {p.name: p.stat().st_ino for p in blobs.iterdir()}
    head = write_tiny_head(tmp_path / "head", snapshot)
    for link in ("hard", "copy"):
        out = write_graft(plan_graft(snapshot, head), tmp_path / link, link=link).out
        assert verify_graft(out, snapshot).ok
        shared = {p.name for p in out.iterdir() if p.stat().st_ino in inodes.values()}
        assert shared == (
            {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"}
            if link == "hard"
            else set()
        )
        assert not any(path.is_symlink() for path in out.iterdir())
        assert contents(blobs) == before
