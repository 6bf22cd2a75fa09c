"""Training from a cache and from a server: the losses of the base in process, and no base."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from command_line import run
from states_server import StatesServer
from training import tiny_recipe, write_training_base, write_training_data

from graft.errors import UserError
from graft.manifest import HeadFolder
from mtp.history import read_history
from mtp.recipe import TeacherRecipe, load_recipe
from mtp.recipe_text import dump_recipe
from mtp.teacher import Teacher
from mtp.train import train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    base = write_training_base(folder / "base")
    data = write_training_data(folder / "data", base)
    (folder / "recipe.toml").write_text(dump_recipe(recipe(None)))
    run("data", "cache", "--base", base, "--data", data, "--out", folder / "cache", "--split",
        "train", "--device", "cpu", "--recipe", folder / "recipe.toml")  # fmt: skip
    return base, data, folder / "cache"


def recipe(cache, **settings):
    settings = {"steps": 6, "eval_every": 3, "micro_batch_tokens": 60, **settings}
    teacher = TeacherRecipe(kind="cache", cache=str(cache)) if cache else TeacherRecipe()
    return dataclasses.replace(tiny_recipe(**settings), teacher=teacher)


@pytest.fixture(scope="module")
def in_process(place, tmp_path_factory):
    base, data, _ = place
    out = tmp_path_factory.mktemp("in_process") / "head"
    return train(base, data, out, recipe(None), device="cpu"), losses(out)


def losses(out):
    return [record["loss"] for record in read_history(out / "history.jsonl")]


def states(out):
    folder = max((out.parent / f"{out.name}.run" / "checkpoints").iterdir())
    return {k: v for shard in folder.glob("*.safetensors") for k, v in load_file(shard).items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def without_a_base(monkeypatch):
    def load(*_, **__):
        raise AssertionError("the base was loaded")

    monkeypatch.setattr(Teacher, "load", load)


def test_losses_from_the_cache_are_those_in_process_to_bfloat16(
    place, in_process, tmp_path, monkeypatch, capsys
):
    base, data, cache = place
    summary, wanted = in_process
    without_a_base(monkeypatch)
    run("train", cache.parent / "recipe.toml", "--base", base, "--data", data, "--out",
        tmp_path / "head", "--set", "teacher.kind=cache", "--set", f"teacher.cache={cache}",
        "--device", "cpu", "--json")  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert losses(tmp_path / "head") == pytest.approx(wanted, rel=2**-8)
    assert losses(tmp_path / "head") != wanted  # it did read bfloat16
    assert found["before"] == summary["before"]  # held-out states are kept as computed
    assert found["after"]["num_drafts"] > 0
    # Negative control: other rows' losses are told apart.
    train(base, data, tmp_path / "other", recipe(cache, seed=1), device="cpu")
    assert losses(tmp_path / "other") != pytest.approx(wanted, rel=2**-8)


def test_a_run_from_the_cache_resumes_bit_for_bit_and_without_a_base(place, tmp_path, monkeypatch):
    base, data, cache = place
    train(base, data, tmp_path / "whole", recipe(cache, steps=7), device="cpu", max_steps=6)
    without_a_base(monkeypatch)
    settings = {"device": "cpu", "resume": True, "overwrite": True}
    for last in (2, 6):
        train(base, data, tmp_path / "parts", recipe(cache, steps=7), max_steps=last, **settings)
    assert same(states(tmp_path / "whole"), states(tmp_path / "parts"))
    # Negative control: other prompts are not in the cache, so they need the base.
    others = dataclasses.replace(recipe(cache), eval=dataclasses.replace(
        recipe(cache).eval, num_tokens=9))  # fmt: skip
    with pytest.raises(AssertionError, match="the base was loaded"):
        train(base, data, tmp_path / "other", others, device="cpu")


def test_a_server_gives_the_same_losses(place, in_process, tmp_path):
    base, data, cache = place
    (tmp_path / "states").mkdir()
    server = StatesServer(Teacher.load(base, device="cpu"), tmp_path / "states")
    teacher = TeacherRecipe(kind="server", url=server.url, states=str(server.states))
    try:
        asked = dataclasses.replace(recipe(cache), teacher=teacher)
        summary = train(base, data, tmp_path / "head", asked, device="cpu")
    finally:
        server.shutdown()
        server.server_close()
    assert server.num_requests > 6
    assert losses(tmp_path / "head") == pytest.approx(in_process[1], rel=1e-4)
    assert summary["before"] == in_process[0]["before"]
    # Where states came from is published with a head, the place is not.
    assert HeadFolder(tmp_path / "head").metadata["provenance"]["recipe"]["teacher"] == {
        "kind": "server"
    }


def test_a_cache_of_another_base_or_other_rows_is_refused_with_the_reason(place, tmp_path):
    base, data, cache = place
    other = write_training_data(tmp_path / "data", base, seed=1)
    with pytest.raises(UserError, match=r"token_ids_sha256\.train"):
        train(base, other, tmp_path / "head", recipe(cache), device="cpu")
    another = write_training_base(tmp_path / "base", seed=1)
    with pytest.raises(UserError, match=r"fingerprint"):
        train(another, data, tmp_path / "head", recipe(cache), device="cpu")
    with pytest.raises(UserError, match="a cache of hidden states"):
        train(base, data, tmp_path / "head", recipe(tmp_path / "none"), device="cpu")
    with pytest.raises(UserError, match="apart from the input"):
        train(base, data, cache / "head", recipe(cache), device="cpu")
    assert not (tmp_path / "head.run").exists()


@pytest.mark.parametrize("damage", ["truncated", "rolled", "other"])
def test_broken_continuations_are_refused(place, tmp_path, damage):
    base, data, cache = place
    cache = shutil.copytree(cache, tmp_path / "cache")
    for file in (cache / "continuations").glob("*"):
        file.unlink()
    train(base, data, tmp_path / "head", recipe(cache), device="cpu", max_steps=1)
    (file,) = (cache / "continuations").iterdir()
    tensors = load_file(file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "rolled":
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        save_file({**tensors, "states": tensors["states"].roll(1, 0)}, file, metadata)
    else:
        save_file({"states": tensors["states"]}, file)
    with pytest.raises(UserError, match="remove that file"):
        train(base, data, tmp_path / "again", recipe(cache), device="cpu", max_steps=1)


def test_a_cached_state_that_is_no_number_names_its_row(place, tmp_path):
    base, data, cache = place
    cache = shutil.copytree(cache, tmp_path / "cache")
    shard = cache / "train" / "00000.safetensors"
    tensors = load_file(shard)
    row = int(tensors["rows"][0])  # the longest; on opening a cache the last row is looked at
    tensors["hidden"][3] = float("nan")
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(UserError, match="a loss of nan") as caught:
        train(base, data, tmp_path / "head", recipe(cache, steps=40), device="cpu")
    assert f"row {row}: train-{row} of rows.jsonl" in str(caught.value)
    assert not (tmp_path / "head").exists()
    assert all(tensor.isfinite().all() for tensor in states(tmp_path / "head").values())


def test_a_shard_without_what_it_is_checked_by_is_named(place, tmp_path):
    base, data, cache = place
    cache = shutil.copytree(cache, tmp_path / "cache")
    shard = cache / "train" / "00000.safetensors"
    tensors = load_file(shard)
    del tensors["checked"]
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(UserError, match="no checked"):
        train(base, data, tmp_path / "head", recipe(cache), device="cpu")


def test_the_command_line_chooses_the_teacher(tmp_path):
    chosen = load_recipe(None, ["teacher.kind=cache", "teacher.cache=some/where"]).teacher
    assert (chosen.kind, chosen.cache) == ("cache", "some/where")
    for settings, missing in (
        (["teacher.kind=cache"], "teacher.cache"),
        (["teacher.kind=server", "teacher.url=http://here"], "teacher.states"),
        (["teacher.kind=memory"], "kind"),
    ):
        with pytest.raises(UserError, match=missing):
            load_recipe(None, settings)
