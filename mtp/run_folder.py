"""The run folder beside a head: everything that a run needs to go on, and its log.

    head.run/
      recipe.toml      the resolved recipe, every key
      run.json         what identifies the run: recipe, base, data, draft
      history.jsonl    one line an optimizer step
      checkpoints/     step-00000120/ ...: the newest `keep_checkpoints` resume states
      best/            step-00000100/: the head with the best held-out acceptance so far
      tensorboard/     where asked for

Only one process at a time may have it open; a lock that dies with the process sees to that.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graft.errors import UserError
from graft.index import read_json, write_json
from graft.staging import locked
from mtp.checkpoint import read_state
from mtp.history import HISTORY, HISTORY_SCHEMA, read_history

SCHEMA_VERSION = 1
LOCK, IDENTITY, RECIPE = ".lock", "run.json", "recipe.toml"
CHECKPOINTS, BEST = "checkpoints", "best"
# Keys that a resumed run may change: they decide how a step is computed and what is kept of it.
FREE_KEYS = {
    f"recipe.train.{name}"
    for name in (
        "checkpoint_every", "keep_checkpoints", "micro_batch_tokens", "activation_checkpointing",
    )
}  # fmt: skip


class RunFolder:
    """Paths and records of one run; make it with `open_run`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted((self.path / CHECKPOINTS).glob("step-*"))

    def checkpoint(self, step: int) -> Path:
        return self.path / CHECKPOINTS / f"step-{step:08d}"

    def best(self, step: int) -> Path:
        return self.path / BEST / f"step-{step:08d}"

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a step to the history."""
        with (self.path / HISTORY).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def sync_history(self) -> None:
        """Make sure that the history is on disk, before a checkpoint that counts on it."""
        with (self.path / HISTORY).open("a") as file:
            os.fsync(file.fileno())

    def restart_history(self, step: int) -> list[dict[str, Any]]:
        """Cut the history to its first `step` steps, and return them.

        Raises:
            UserError: it has fewer.
        """
        path = self.path / HISTORY
        records = read_history(path)[:step] if path.is_file() else []
        if len(records) != step:
            raise UserError(
                f"{step} steps in {path}", f"{len(records)}", "restore it, or start a new run"
            )
        staging = path.with_name(f".{HISTORY}")
        lines = [{"schema_version": HISTORY_SCHEMA}, *records]
        staging.write_text("".join(json.dumps(line) + "\n" for line in lines))
        staging.replace(path)
        return records

    def prune(self, keep: int, best: int | None = None) -> None:
        """Remove all but the newest `keep` checkpoints, and heads that neither these count as
        their best nor the run does, of step `best`; also what a killed run left half written or
        half removed."""
        kept = self.checkpoints()[-max(keep, 1) :]
        steps = {(read_state(path).get("best") or {}).get("step") for path in kept} | {best}
        wanted = {*kept, *(self.best(step) for step in steps if step is not None)}
        for folder in (self.path / CHECKPOINTS, self.path / BEST):
            for path in folder.iterdir():
                if path not in wanted:
                    _remove(path)

    def newest_state(self) -> dict[str, Any]:
        """The state in the newest checkpoint, or nothing."""
        checkpoints = self.checkpoints()
        return read_state(checkpoints[-1]) if checkpoints else {}

    def deliver(self, best: Path, folder: Path) -> None:
        """Put a head of this run, its recipe and its history into `folder`."""
        for path in best.iterdir():
            try:
                (folder / path.name).hardlink_to(path)
            except OSError:
                shutil.copyfile(path, folder / path.name)
        for name in (RECIPE, HISTORY):
            shutil.copyfile(self.path / name, folder / name)

    def close(self) -> None:
        """The run is over: what it needed to go on is removed, its log stays."""
        # Said first: a run killed in between must not start again for want of checkpoints.
        _write_identity(self.path, read_json(self.path / IDENTITY) | {"finished": True})
        for name in (CHECKPOINTS, BEST):
            shutil.rmtree(self.path / name)


def run_path(out: Path) -> Path:
    """The run folder of a head folder: `head` has `head.run` beside it."""
    return out.with_name(out.name + ".run")


def check_run(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse, before anything is loaded, to lose a run or to resume one that is over.

    Raises:
        UserError: checkpoints are there and neither resume nor overwrite was asked for, or resume
            was and the run has finished; or the folder is no run's, and would be emptied.
    """
    own = (LOCK, f".{IDENTITY}")
    strangers = [p.name for p in path.iterdir() if p.name not in own] if path.is_dir() else []
    if strangers and not (path / IDENTITY).is_file():
        raise UserError(
            f"a run's folder at {path} (with {IDENTITY}), or none",
            f"{', '.join(sorted(strangers)[:3])}",
            "choose another --out, or remove that folder yourself",
        )
    finished = (path / IDENTITY).is_file() and read_json(path / IDENTITY).get("finished")
    if RunFolder(path).checkpoints() and not (finished or resume or overwrite):
        raise UserError(
            "no unfinished run",
            f"{path}",
            "pass --resume to go on with it, or --overwrite to start again",
        )
    if resume and finished:
        raise UserError(
            "an unfinished run to resume",
            f"{path}, which has finished",
            "start a new run with --overwrite and without --resume",
        )


@contextlib.contextmanager
def open_run(
    path: Path,
    identity: Mapping[str, Any],
    recipe_text: str,
    *,
    resume: bool,
    write: bool = True,
) -> Iterator[RunFolder]:
    """The run folder, locked; emptied first unless `resume`.

    Args:
        path: see `run_path`.
        identity: what a resumed run must have in common with the one that it goes on with.
        recipe_text: the resolved recipe.
        resume: go on with what is there; a folder without a checkpoint is started afresh.
        write: False in all processes but one, which lock nothing and change nothing.

    Raises:
        UserError: another process has it open, or it belongs to another run.
    """
    run = RunFolder(path)
    if not write:
        yield run
        return
    path.mkdir(parents=True, exist_ok=True)
    with locked(path / LOCK, path):
        if resume and run.checkpoints():
            _require_same(read_json(path / IDENTITY), identity, path)
        else:
            _empty(path)
        # First, since it tells this folder from somebody else's.
        _write_identity(path, {"schema_version": SCHEMA_VERSION, **identity})
        (path / CHECKPOINTS).mkdir(exist_ok=True)
        (path / BEST).mkdir(exist_ok=True)
        (path / RECIPE).write_text(recipe_text, encoding="utf-8")
        yield run


def _write_identity(path: Path, identity: Mapping[str, Any]) -> None:
    """In one step: without this file, a run with checkpoints could not go on."""
    staging = path / f".{IDENTITY}"
    write_json(staging, identity)
    staging.replace(path / IDENTITY)


def _require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    left, right = _flat(found), _flat({"schema_version": SCHEMA_VERSION, **wanted})
    different = sorted(
        key
        for key in left.keys() | right.keys()
        if key not in FREE_KEYS and left.get(key) != right.get(key)
    )
    if different:
        shown = [f"{key} {left.get(key)!r} there, {right.get(key)!r} now" for key in different[:8]]
        raise UserError(
            f"the recipe, base and data of the run in {path}",
            "; ".join(shown) + ("" if len(different) <= 8 else f"; {len(different) - 8} more"),
            "resume with what it was started with, or start a new run with --overwrite",
        )


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; lists count as one value, as JSON keeps them."""
    flat: dict[str, Any] = {}
    for key, item in json.loads(json.dumps(value)).items():
        flat |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {prefix + key: item}
    return flat


def _remove(path: Path) -> None:
    """Remove a file or a folder, which loses its name first: a kill leaves no half of one."""
    if path.is_dir() and not path.is_symlink():
        hidden = path.with_name(f".removed.{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)  # of an earlier kill
        path.rename(hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)


def _empty(path: Path) -> None:
    for item in path.iterdir():
        if item.name in (LOCK, IDENTITY):
            continue
        _remove(item)
