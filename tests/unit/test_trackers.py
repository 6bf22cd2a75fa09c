"""`--tracker`: every step reaches accelerate's trackers once, and they are closed whatever happens.

TensorBoard and wandb are no dependencies, so a recorder stands in for TensorBoard's tracker; where
the package is installed, its own files are read as well.
"""

import sys
from pathlib import Path
from typing import ClassVar

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import tiny_recipe, write_training_base, write_training_data

from graft.errors import UserError
from mtp.history import flat_numbers, read_history
from mtp.teacher import Teacher
from mtp.train import train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    base = write_training_base(folder / "base")
    return base, write_training_data(folder / "data", base)


class Recorder(tracking.GeneralTracker):
    """Keeps what it is told."""

    name, requires_logging_directory = "tensorboard", True
    events: ClassVar[list] = []

    def __init__(self, run_name, logging_dir, purge_step):
        super().__init__()
        self.folder, self.first = Path(logging_dir) / run_name, purge_step

    @property
    def tracker(self):
        return self

    def start(self):
        self.folder.mkdir(exist_ok=True)
        self.events.append(("start", self.first))

    def log(self, values, step, **_):
        self.events.append((step, values))

    def finish(self):
        self.events.append(("finish", self.folder.is_dir()))


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.TENSORBOARD])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Recorder)
    monkeypatch.setattr(Recorder, "events", [])
    return Recorder.events


def test_every_step_is_tracked_once_over_a_stop(place, tmp_path, events):
    recipe = tiny_recipe(steps=5)
    train(*place, tmp_path / "head", recipe, max_steps=2, device="cpu", tracker="tensorboard")
    train(*place, tmp_path / "head", recipe, device="cpu", tracker="tensorboard", resume=True,
          overwrite=True)  # fmt: skip
    assert [name for name, _ in events] == [
        "start", 1, 2, "finish", "start", 3, 4, 5, "finish"]  # fmt: skip
    # The second start hides what came after its checkpoint; the folder outlives the run.
    assert events[0] == ("start", 1) and events[4] == ("start", 3)
    assert events[3] == events[-1] == ("finish", True)
    history = [flat_numbers(record) for record in read_history(tmp_path / "head" / "history.jsonl")]
    assert [values for name, values in events if isinstance(name, int)] == history
    assert "loss_per_position/2" in history[0] and "cumulative/1" in history[-1]


def test_a_tracker_is_closed_when_the_run_fails(place, tmp_path, events, monkeypatch):
    real = Teacher.batch_hidden
    monkeypatch.setattr(Teacher, "batch_hidden", lambda *a: real(*a) * float("nan"))
    with pytest.raises(UserError, match="a loss of nan"):
        train(*place, tmp_path / "head", tiny_recipe(), device="cpu", tracker="tensorboard")
    assert [name for name, _ in events] == ["start", "finish"]


def test_unknown_and_missing_trackers_are_named(place, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_available_trackers", [])
    for name, found in (("wandb", "pip install wandb"), ("mlflow", "choose one of them")):
        with pytest.raises(UserError, match=found):
            train(*place, tmp_path / "head", tiny_recipe(), device="cpu", tracker=name)
    assert not (tmp_path / "head.run").exists()


def test_tensorboard_itself_reads_the_same_losses(place, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments = (*place, tmp_path / "head", tiny_recipe(steps=3))
    train(*arguments, device="cpu", tracker="tensorboard")
    found = events.EventAccumulator(str(tmp_path / "head.run" / "tensorboard"))
    found.Reload()
    losses = [record["loss"] for record in read_history(tmp_path / "head" / "history.jsonl")]
    assert [event.value for event in found.Scalars("loss")] == pytest.approx(losses)
