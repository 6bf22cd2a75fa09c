"""Staging: nothing half-written, nothing written into an input, two writers kept apart."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from graft import staging
from graft.errors import UserError
from graft.staging import staged_folder


def write(out, text, **keywords):
    with staged_folder(out, **{"overwrite": False, **keywords}) as folder:
        (folder / "file").write_text(text)


def test_the_folder_appears_whole_and_alone(tmp_path):
    out = tmp_path / "deep" / "out"
    with staged_folder(out, overwrite=False) as folder:
        (folder / "file").write_text("new")
        assert not out.exists()
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert (out / "file").read_text() == "new"


def test_an_exception_leaves_nothing_and_keeps_the_old_one(tmp_path):
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "a" / "b", overwrite=False):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "out", "old")
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "out", overwrite=True):
        raise KeyboardInterrupt
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_overwrite_replaces_the_whole_folder(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(staging, "_exchange", lambda left, right: False)
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(UserError, match="--overwrite"):
        write(out, "new")
    remove = staging.shutil.rmtree

    def remove_anything_but_the_output(path, **keywords):
        assert path != out and list(out.iterdir()), "a kill now would leave no whole output"
        remove(path, **keywords)

    monkeypatch.setattr(staging.shutil, "rmtree", remove_anything_but_the_output)
    write(out, "new", overwrite=True)
    assert [p.name for p in out.iterdir()] == ["file"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["base", "base/inside", "."])
def test_out_may_not_touch_an_input(tmp_path, where):
    base = tmp_path / "base"
    base.mkdir()
    with pytest.raises(UserError, match="never written to"):
        write(tmp_path / where, "x", overwrite=True, sources=[base])
    (tmp_path / "link").symlink_to(base)
    with pytest.raises(UserError):
        write(tmp_path / "link" / "out", "x", sources=[base])
    assert list(base.iterdir()) == []


def test_links_files_and_the_working_directory_are_refused(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("mine")
    for name in ("link", "file"):
        with pytest.raises(UserError):
            write(tmp_path / name, "x", overwrite=True)
    monkeypatch.chdir(tmp_path / "real")
    with pytest.raises(UserError, match="working directory"):
        write(tmp_path / "real", "x", overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_only_an_output_of_the_same_command_is_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="remove that folder yourself"):
        write(tmp_path / "thesis", "new", overwrite=True, mark="file")
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    for text in ("new", "newer"):  # an empty folder, and then an output with its mark
        write(tmp_path / "empty", text, overwrite=True, mark="file")
    assert (tmp_path / "empty" / "file").read_text() == "newer"


def test_what_an_input_links_to_is_not_replaced(tmp_path):
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshot"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    (blobs / "file").write_text("old")
    (snapshot / "file").symlink_to("../blobs/file")
    with pytest.raises(UserError, match="to which the input links"):
        write(blobs, "new", overwrite=True, sources=[snapshot])
    assert (snapshot / "file").read_text() == "old"
    write(blobs / "inside", "beside the files is fine", sources=[snapshot])


@pytest.mark.parametrize("name", ["x" * 236, "ü" * 118, "x" * 255])
def test_a_name_that_leaves_no_room_for_the_staging_folders_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="shorter --out"):
        write(tmp_path / name, "x")
    write(tmp_path / name[: 235 // len(name[0].encode())], "x")


def test_a_second_writer_of_the_same_folder_is_turned_away(tmp_path):
    with staged_folder(tmp_path / "out", overwrite=False) as folder:
        with pytest.raises(UserError, match="lock"):
            write(tmp_path / "out", "second")
        write(tmp_path / "other", "fine")
        assert folder.exists()
    write(tmp_path / "out", "after", overwrite=True)


def test_left_overs_of_killed_runs_are_cleaned_up(tmp_path):
    (tmp_path / ".out.staging-99").mkdir()
    (tmp_path / ".out.staging-99" / "half").write_text("half")
    (tmp_path / ".out.staging-notes").mkdir()
    (tmp_path / ".out.staging-7").write_text("a file")
    (tmp_path / ".out.staging-8").symlink_to(tmp_path / ".out.staging-notes")
    (tmp_path / ".out.lock").write_text("")
    (tmp_path / ".out.previous").mkdir()
    (tmp_path / ".out.previous" / "file").write_text("moved aside by a killed run")
    with pytest.raises(UserError, match="exists"):  # the old one is back, so it is not replaced
        write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "moved aside by a killed run"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.staging-notes", "out"]


def test_another_process_locks_until_it_ends_even_if_it_is_killed(tmp_path):
    reader, pipe = os.pipe()
    child = os.fork()
    if not child:
        with staged_folder(tmp_path / "out", overwrite=False) as folder:
            (folder / "half").write_text("half")
            os.write(pipe, b"x")
            signal.pause()
    os.read(reader, 1)
    try:
        with pytest.raises(UserError, match="wait for it to end"):
            write(tmp_path / "out", "second")
        assert any(".staging-" in p.name for p in tmp_path.iterdir()), "a live one was removed"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    write(tmp_path / "out", "third")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_links_in_a_circle_and_file_systems_without_locks_are_named(tmp_path, monkeypatch):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UserError, match="remove those links"):
        write(tmp_path / "a" / "out", "new")

    def no_locks(descriptor, flags):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(staging.fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=r"No locks available.*local disk"):
        write(tmp_path / "out", "new")
    assert sorted(p.name for p in tmp_path.iterdir() if not p.is_symlink()) in ([], [".out.lock"])
