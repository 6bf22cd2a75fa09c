"""The run folder through kills, full disks and files that somebody changed."""

import dataclasses
import json
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from datasets import DatasetDict
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import tiny_recipe, write_training_base, write_training_data

from graft.errors import UserError
from mtp import run_folder
from mtp.checkpoint import load_checkpoint, read_state
from mtp.history import read_history
from mtp.run_folder import check_run, open_run
from mtp.train import train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    base = write_training_base(folder / "base")
    return base, write_training_data(folder / "data", base)


@pytest.fixture
def run(tmp_path):
    """A run that has one checkpoint, without the tensors."""
    with open_run(tmp_path / "head.run", {"recipe": 1}, "", resume=False) as opened:
        opened.checkpoint(2).mkdir()
        yield opened


def test_a_full_disk_is_said_and_the_run_goes_on_later(place, tmp_path):
    recipe = tiny_recipe(steps=4, checkpoint_every=2, eval_every=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # less than a checkpoint
    try:
        with pytest.raises(UserError, match=r"state-00001\.safetensors written; .*too large"):
            train(*place, tmp_path / "head", recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "head.run" / "checkpoints").iterdir())
    assert train(*place, tmp_path / "head", recipe, resume=True)["complete"]


def test_a_kill_while_the_identity_is_written_keeps_the_one_before(run, monkeypatch):
    def killed(path, value):
        path.write_text('{"recipe":')
        raise KeyboardInterrupt

    before = (run.path / "run.json").read_bytes()
    monkeypatch.setattr(run_folder, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        run.close()
    assert (run.path / "run.json").read_bytes() == before
    # The first one ever leaves a folder that is nobody else's.
    (run.path.parent / "new.run").mkdir()
    (run.path.parent / "new.run" / ".run.json").write_text("{")
    check_run(run.path.parent / "new.run", resume=True, overwrite=False)


def test_a_kill_while_a_finished_run_is_cleared_does_not_start_it_again(run, monkeypatch):
    def killed(path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run.close()
    assert run.checkpoints()
    with pytest.raises(UserError, match="which has finished"):
        check_run(run.path, resume=True, overwrite=True)
    check_run(run.path, resume=False, overwrite=False)  # nothing left to lose


def test_a_checkpoint_that_was_half_removed_is_none(run, monkeypatch):
    (run.checkpoint(2) / "state.json").write_text("{")
    real = run_folder.shutil.rmtree

    def killed(path, **options):
        if not options:
            raise KeyboardInterrupt
        real(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "read_state", lambda _: {})
        run.checkpoint(4).mkdir()
        patched.setattr(run_folder.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            run.prune(1)
        assert run.checkpoints() == [run.checkpoint(4)]
        patched.setattr(run_folder.shutil, "rmtree", real)
        run.prune(1)
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_checkpoint_whose_header_is_broken_is_named(tmp_path):
    module = torch.nn.Linear(2, 2)
    save_file({f"weight/{n}": p.detach() for n, p in module.named_parameters()},
              tmp_path / "state-00001.safetensors")  # fmt: skip
    load_checkpoint(tmp_path, module, [])
    shard = bytearray((tmp_path / "state-00001.safetensors").read_bytes())
    shard[3] ^= 255
    (tmp_path / "state-00001.safetensors").write_bytes(shard)
    with pytest.raises(UserError, match=r"state-00001.*remove that folder"):
        load_checkpoint(tmp_path, module, [])


@pytest.mark.parametrize("lost", ["shards", "state"])
def test_a_checkpoint_that_lost_its_state_is_named(tmp_path, lost):
    contents = {"schema_version": 1, "shards": {}, "state": {"step": 1}}
    (tmp_path / "state.json").write_text(json.dumps(contents))
    assert read_state(tmp_path) == {"step": 1}
    for damaged in (contents | {lost: None}, {k: v for k, v in contents.items() if k != lost}):
        (tmp_path / "state.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="without shards or state; remove that folder"):
            read_state(tmp_path)


@pytest.mark.parametrize("line", ['{"step": 3, "loss": 1.0}', '{"step": 1}', "3"])
def test_a_history_that_lost_a_step_is_refused(tmp_path, line):
    path = tmp_path / "history.jsonl"
    path.write_text('{"schema_version": 2}\n{"step": 1, "loss": 1.0}\n')
    assert len(read_history(path)) == 1
    path.write_text(f'{{"schema_version": 2}}\n{line}\n')
    with pytest.raises(UserError, match="step 1 and its loss on line 2"):
        read_history(path)
    path.write_text("")
    with pytest.raises(UserError, match="a history of schema 2"):
        read_history(path)


def test_a_run_does_not_go_on_with_rows_of_other_categories(place, tmp_path):
    """Their weights are in the recipe; what they weigh is in the data."""
    base, data = place
    loss = dataclasses.replace(tiny_recipe().loss, category_weights={"chat": 2.0})
    recipe = dataclasses.replace(tiny_recipe(), loss=loss)
    train(base, data, tmp_path / "head", recipe, max_steps=1)
    rows = DatasetDict.load_from_disk(str(data))

    def named(number):
        return "code" if number % 2 else "chat"

    rows["train"] = rows["train"].map(lambda _, number: {"category": named(number)},
                                      with_indices=True)  # fmt: skip
    other = tmp_path / "other"
    rows.save_to_disk(str(other))
    shutil.copyfile(data / "data.json", other / "data.json")
    with pytest.raises(UserError, match="found data '"):
        train(base, other, tmp_path / "head", recipe, resume=True, overwrite=True)


def test_a_run_does_not_go_on_with_a_base_of_another_trunk(place, tmp_path):
    """Layers between embedding and output decide the hidden states, and no fingerprint has them."""
    base, data = place
    train(base, data, tmp_path / "head", tiny_recipe(), max_steps=1)
    other = write_training_base(tmp_path / "other")
    (shard,) = other.glob("*.safetensors")
    tensors = load_file(shard)
    changed = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[changed] += 0.5
    save_file(tensors, shard, {"format": "pt"})
    again = {"resume": True, "overwrite": True, "max_steps": 2}
    with pytest.raises(UserError, match=r"base\.trunk_sha256"):
        train(other, data, tmp_path / "head", tiny_recipe(), **again)
    moved = base.rename(tmp_path / "moved")  # the same base elsewhere
    try:
        assert train(moved, data, tmp_path / "head", tiny_recipe(), **again)["steps"] == 2
    finally:
        moved.rename(base)
