"""The training loop: order, normalisation, best head, stopping."""

import dataclasses
import itertools
import json
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import tiny_recipe, write_training_base, write_training_data

from graft.errors import UserError
from graft.manifest import HeadFolder
from mtp.checkpoint import disk_bytes, read_state
from mtp.data.store import load_prepared
from mtp.history import read_history
from mtp.recipe import LossStage
from mtp.schedule import StepBatches
from mtp.teacher import Teacher
from mtp.train import train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    base = write_training_base(folder / "base")
    return base, write_training_data(folder / "data", base)


def history(out):
    return read_history(out / "history.jsonl")


def untimed(records):
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records]


def weights(head):
    return HeadFolder(head).load_all()


def states(out):
    """All tensors of the newest checkpoint: float32 weights and optimizer state."""
    from safetensors.torch import load_file

    folder = max((out.parent / f"{out.name}.run" / "checkpoints").iterdir())
    return {k: v for shard in folder.glob("*.safetensors") for k, v in load_file(shard).items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("steps", [1, 5])
def test_bug_G1_max_steps_stops_at_exactly_that_step(place, tmp_path, steps):
    """bugs.md G1: `--max-steps 3` ran 7 steps."""
    summary = train(*place, tmp_path / "head", tiny_recipe(), max_steps=steps)
    assert summary["steps"] == steps == len(history(tmp_path / "head"))
    assert not summary["complete"]


def test_more_steps_than_the_recipe_has_are_not_run(place, tmp_path):
    summary = train(*place, tmp_path / "head", tiny_recipe(steps=3), max_steps=5)
    assert summary["steps"] == 3 and summary["complete"]


def test_a_run_stopped_and_resumed_twice_equals_one_that_was_not(place, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(*place, whole, tiny_recipe(steps=11), max_steps=10)
    for last in (2, 5, 10):
        train(*place, parts, tiny_recipe(steps=11), max_steps=last, resume=True, overwrite=True)
    assert same(states(whole), states(parts))
    measured = ("mean_accepted", "cumulative")  # a stop at step 2 measures there too

    def trained(out):
        return [{k: v for k, v in r.items() if k not in measured} for r in untimed(history(out))]

    assert trained(whole) == trained(parts)
    assert [r["step"] for r in history(parts)] == list(range(1, 11))
    # Negative control: another step gives other tensors.
    train(*place, tmp_path / "other", tiny_recipe(steps=11), max_steps=9)
    assert not same(states(whole), states(tmp_path / "other"))


def test_bug_G4_the_head_of_highest_acceptance_is_written(place, tmp_path, monkeypatch):
    accepted = iter([0.1, 0.5, 0.9, 0.3, 0.2])
    from mtp import draft

    real = draft.measure

    def measure(*args, **kwargs):
        return real(*args, **kwargs) | {"mean_accepted": next(accepted)}

    monkeypatch.setattr(draft, "measure", measure)
    summary = train(*place, tmp_path / "head", tiny_recipe(steps=4, eval_every=1))
    assert summary["best_step"] == 2 and summary["after"]["mean_accepted"] == 0.9
    monkeypatch.undo()
    train(*place, tmp_path / "two", tiny_recipe(steps=4, eval_every=0), max_steps=2)
    assert same(weights(tmp_path / "head"), weights(tmp_path / "two"))
    provenance = HeadFolder(tmp_path / "head").metadata["provenance"]
    assert provenance["step"] == 2 and provenance["warm_start_mean_accepted"] == 0.1


def test_patience_ends_training_on_a_plateau(place, tmp_path, monkeypatch):
    accepted = iter([0.1, 0.5, 0.4, 0.5, 0.9])
    from mtp import draft

    real = draft.measure
    monkeypatch.setattr(
        draft, "measure", lambda *a, **k: real(*a, **k) | {"mean_accepted": next(accepted)}
    )
    summary = train(*place, tmp_path / "head", tiny_recipe(steps=9, eval_every=1, patience=2))
    assert summary["steps"] == 3 and summary["complete"]
    assert summary["best_step"] == 3  # as good as step 1, and trained for longer


def test_measuring_where_a_run_was_stopped_does_not_end_it_early(place, tmp_path, monkeypatch):
    """A head is written at a stop, so it is measured; that is no measurement of the recipe's."""
    from mtp import draft

    real = draft.measure
    monkeypatch.setattr(draft, "measure", lambda *a, **k: real(*a, **k) | {"mean_accepted": 0.5})
    recipe = tiny_recipe(eval_every=4, patience=1)
    stopped = train(*place, tmp_path / "head", recipe, max_steps=6)
    assert not stopped["complete"] and stopped["best_step"] == 6
    resumed = train(*place, tmp_path / "head", recipe, resume=True, overwrite=True)
    whole = train(*place, tmp_path / "whole", recipe)
    assert resumed["steps"] == whole["steps"] == 8 and resumed["complete"] and whole["complete"]
    assert same(weights(tmp_path / "head"), weights(tmp_path / "whole"))


def test_measured_is_what_was_rounded_and_training_goes_on_in_float32(place, tmp_path, monkeypatch):
    """Evaluations must not change the weights that are trained."""
    from mtp import draft

    real, are_rounded = draft.measure, []

    def measure(source, head, *args, **kwargs):
        are_rounded.append(all(torch.equal(p, p.bfloat16().float()) for p in head.parameters()))
        return real(source, head, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(draft, "measure", measure)
        train(*place, tmp_path / "often", tiny_recipe(steps=7, eval_every=1), max_steps=6)
    assert are_rounded[1:] == [True] * 6  # the first is the warm start
    train(*place, tmp_path / "never", tiny_recipe(steps=7, eval_every=0), max_steps=6)
    assert same(states(tmp_path / "often"), states(tmp_path / "never"))
    rounded = [v.to(torch.bfloat16).float() for v in states(tmp_path / "often").values()]
    assert not all(map(torch.equal, rounded, states(tmp_path / "often").values()))


def test_accumulation_is_a_mean_over_targets_not_of_means(place, tmp_path):
    """Micro-batches hold different numbers of targets; the step must not notice."""
    whole = train(*place, tmp_path / "whole", tiny_recipe(eval_every=0))
    parts = train(*place, tmp_path / "parts", tiny_recipe(eval_every=0, micro_batch_tokens=41))
    for left, right in zip(history(tmp_path / "whole"), history(tmp_path / "parts"), strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
        assert left["gradient_norm"] == pytest.approx(right["gradient_norm"], rel=1e-3)
        assert left["learning_rate"] == right["learning_rate"]
        assert left["tokens"] == right["tokens"]
    assert whole["steps"] == parts["steps"] == 12
    records = history(tmp_path / "whole")
    rows = load_prepared(place[1])["train"]
    batches = StepBatches(rows, tiny_recipe().train, min_length=4)
    taken = [[i for part in batches.row_indices(step) for i in part] for step in range(12)]
    each = [sum(map(len, rows[indices]["input_ids"])) for indices in taken]
    assert whole["tokens"] == records[-1]["tokens"] == sum(each)
    spent = [n / record["tokens_per_second"] for n, record in zip(each, records, strict=True)]
    assert whole["seconds"] == pytest.approx(sum(spent))


def test_activation_checkpointing_changes_nothing(place, tmp_path):
    train(*place, tmp_path / "plain", tiny_recipe(steps=3))
    train(*place, tmp_path / "saving", tiny_recipe(steps=3, activation_checkpointing=True))
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "saving"))


def test_a_loss_that_is_no_number_names_step_rows_and_checkpoint(place, tmp_path, monkeypatch):
    recipe = tiny_recipe(steps=40, checkpoint_every=1, micro_batch_tokens=41, eval_every=0)
    rows = load_prepared(place[1])["train"]
    batches = StepBatches(rows, recipe.train, min_length=4)
    bad = batches.row_indices(2)[0]  # the third step's first micro-batch
    poison = torch.tensor(rows[bad[0]]["input_ids"])
    real = Teacher.batch_hidden

    def batch_hidden(self, batch):
        output = real(self, batch)
        ids = batch.input_ids[:, : len(poison)]
        if ids.shape[1] == len(poison):
            output[(ids == poison).all(-1)] = float("nan")
        return output

    monkeypatch.setattr(Teacher, "batch_hidden", batch_hidden)
    with pytest.raises(UserError, match="a loss of nan at step 3") as caught:
        train(*place, tmp_path / "head", recipe)
    line = str(caught.value)
    assert f"row {bad[0]}: train-{bad[0]} of rows.jsonl" in line
    others = {i for part in batches.row_indices(2) for i in part} - set(bad)
    assert others and not any(f"row {i}:" in line for i in others)
    assert "step-00000002" in line and len(history(tmp_path / "head.run")) == 2
    assert not (tmp_path / "head").exists()
    assert all(tensor.isfinite().all() for tensor in states(tmp_path / "head").values())


def test_divergence_is_seen_and_a_bumpy_loss_is_not():
    from mtp.divergence import what_diverged

    falling = [2.0 / (1 + step / 10) for step in range(200)]
    assert what_diverged(0.5, 1.0, falling) is None  # five times the usual: a hard batch
    assert "usual" in what_diverged(4.0, 1.0, falling)
    assert what_diverged(4.0, 1.0, falling[:10]) is None  # too early to say
    assert "inf" in what_diverged(float("inf"), 1.0, [])
    assert "gradient" in what_diverged(1.0, float("nan"), [])


def test_a_stage_of_another_scale_is_no_explosion(place, tmp_path):
    recipe = tiny_recipe(steps=44, eval_every=0, checkpoint_every=0)
    stages = (LossStage(ce=0.01, until=0.5), LossStage(ce=1.0))
    recipe = dataclasses.replace(recipe, loss=dataclasses.replace(recipe.loss, schedule=stages))
    assert train(*place, tmp_path / "head", recipe)["complete"]
    losses = [record["loss"] for record in history(tmp_path / "head")]
    assert min(losses[22:]) > 10 * max(losses[:22])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    place, tmp_path, monkeypatch, number
):
    import mtp.train

    real = mtp.train.optimizer_step

    def step(setup, state, losses, requests):
        if state.step == 3:
            signal.raise_signal(number)
        return real(setup, state, losses, requests)

    recipe = tiny_recipe(steps=9, checkpoint_every=0, eval_every=0)
    monkeypatch.setattr(mtp.train, "optimizer_step", step)
    before = signal.getsignal(number)
    with pytest.raises(UserError, match=f"{number.name} after step 4.*--resume"):
        train(*place, tmp_path / "head", recipe)
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    assert not (tmp_path / "head").exists()
    train(*place, tmp_path / "head", recipe, resume=True, max_steps=8)
    train(*place, tmp_path / "whole", recipe, max_steps=8)
    assert same(states(tmp_path / "head"), states(tmp_path / "whole"))
    assert [r["step"] for r in history(tmp_path / "head")] == list(range(1, 9))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 1e-3}, "recipe.train.learning_rate"),
        ({"steps": 30}, "recipe.train.steps"),
        ({"seed": 1}, "recipe.train.seed"),
    ],
)
def test_resuming_with_another_recipe_is_refused(place, tmp_path, change, named):
    train(*place, tmp_path / "head", tiny_recipe(), max_steps=1)
    with pytest.raises(UserError, match=named):
        train(*place, tmp_path / "head", tiny_recipe(**change), resume=True, overwrite=True)


def test_a_run_is_neither_lost_nor_resumed_on_other_data_nor_resumed_twice(place, tmp_path):
    base, data = place
    train(base, data, tmp_path / "head", tiny_recipe(), max_steps=1)
    (tmp_path / "head").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="--resume"):
        train(base, data, tmp_path / "head", tiny_recipe())
    other = write_training_data(tmp_path / "other", base, seed=1)
    with pytest.raises(UserError, match=r"expected the recipe.*; found data '"):
        train(base, other, tmp_path / "head", tiny_recipe(), resume=True)
    # What only decides how a step is computed may change.
    free = tiny_recipe(micro_batch_tokens=50, activation_checkpointing=True, keep_checkpoints=2)
    summary = train(base, data, tmp_path / "head", free, resume=True)
    assert summary["complete"] and summary["steps"] == 12
    with pytest.raises(UserError, match="which has finished"):
        train(base, data, tmp_path / "head", free, resume=True, overwrite=True)


@pytest.mark.parametrize(
    ("weights", "named"),
    [({"cod": 2.0}, "categories: chat; found cod"), ({"chat": 0.0}, "found 0 for each")],
)
def test_category_weights_that_reach_no_row_are_refused(place, tmp_path, weights, named):
    recipe = tiny_recipe(steps=1)
    loss = dataclasses.replace(recipe.loss, category_weights=weights)
    with pytest.raises(UserError, match=named):
        train(*place, tmp_path / "head", dataclasses.replace(recipe, loss=loss))
    assert not (tmp_path / "head.run").exists()


def test_what_is_wrong_is_said_before_the_base_is_loaded(place, tmp_path, monkeypatch):
    monkeypatch.setattr(Teacher, "load", lambda *_, **__: pytest.fail("loaded"))
    recipe = tiny_recipe(steps=1)
    no_prompt = dataclasses.replace(recipe.eval, max_prompt_tokens=1)
    small = dataclasses.replace(recipe.train, micro_batch_tokens=10)
    misspelt = dataclasses.replace(recipe.head, warm_start="lasst")
    for wrong, named in (
        ({"eval": no_prompt}, "held-out prompts"),
        ({"train": small}, "longest"),
        ({"head": misspelt}, "warm_start auto, native, last, random or a head folder"),
    ):
        with pytest.raises(UserError, match=named):
            train(*place, tmp_path / "head", dataclasses.replace(recipe, **wrong))
    assert not (tmp_path / "head.run").exists()


def test_prompts_that_give_no_draft_measure_nothing(place, tmp_path):
    recipe = tiny_recipe(steps=1)
    one = dataclasses.replace(recipe.eval, num_tokens=1)
    with pytest.raises(UserError, match=r"raise eval\.num_tokens"):
        train(*place, tmp_path / "head", dataclasses.replace(recipe, eval=one))


def test_only_what_training_wrote_is_replaced(place, tmp_path):
    for name, named in (("head", "head.json"), ("head.run", "run.json")):
        own = tmp_path / name / "thesis.txt"
        own.parent.mkdir()
        own.write_text("mine")
        with pytest.raises(UserError, match=named):
            train(*place, tmp_path / "head", tiny_recipe(), overwrite=True)
        assert own.read_text() == "mine"
        own.unlink()
    train(*place, tmp_path / "head", tiny_recipe(), max_steps=1, overwrite=True)
    train(*place, tmp_path / "head", tiny_recipe(), max_steps=1, overwrite=True)  # its own


def test_checkpoints_are_pruned_to_the_newest_and_the_heads_they_name(place, tmp_path):
    recipe = tiny_recipe(steps=20, checkpoint_every=2, keep_checkpoints=3, eval_every=3)
    train(*place, tmp_path / "head", recipe, max_steps=13)
    run = tmp_path / "head.run"
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step-00000010", "step-00000012", "step-00000013"]
    named = {f"step-{read_state(run / 'checkpoints' / k)['best']['step']:08d}" for k in kept}
    assert named <= {path.name for path in (run / "best").iterdir()}
    summary = train(*place, tmp_path / "head", recipe, resume=True, overwrite=True)
    assert summary["complete"]
    assert {path.name for path in run.iterdir()} == {
        "history.jsonl", "recipe.toml", "run.json",
    }  # fmt: skip


@pytest.mark.parametrize(("keep", "every"), [(1, 0), (1, 3), (3, 2)])
def test_heads_that_get_better_and_better_fill_no_disk(place, tmp_path, monkeypatch, keep, every):
    """Each measurement is a best head; those that no checkpoint goes back to are removed."""
    from mtp import draft
    from mtp.run_folder import RunFolder

    real, accepted, prune, sizes = draft.measure, itertools.count(), RunFolder.prune, []
    monkeypatch.setattr(
        draft, "measure", lambda *a, **k: real(*a, **k) | {"mean_accepted": next(accepted)}
    )

    def before_pruning(run, *arguments):  # when there is most
        checkpoints, heads = (len(list((run.path / n).glob("*"))) for n in ("checkpoints", "best"))
        sizes.append(12 * checkpoints + 2 * heads)
        prune(run, *arguments)

    monkeypatch.setattr(RunFolder, "prune", before_pruning)
    recipe = tiny_recipe(steps=12, eval_every=1, checkpoint_every=every, keep_checkpoints=keep)
    train(*place, tmp_path / "head", recipe, max_steps=11)
    found = [path.name for path in (tmp_path / "head.run" / "best").iterdir()]
    assert max(sizes) <= disk_bytes(torch.nn.Linear(1, 1, bias=False), keep)
    assert len(found) == keep and "step-00000011" in found


def test_a_broken_checkpoint_is_named(place, tmp_path):
    train(*place, tmp_path / "head", tiny_recipe(), max_steps=2)
    shard = next((tmp_path / "head.run" / "checkpoints").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(UserError, match=shard.name):
        train(*place, tmp_path / "head", tiny_recipe(), resume=True, overwrite=True)


def test_a_full_disk_is_foreseen(place, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match="GB free"):
        train(*place, tmp_path / "head", tiny_recipe())
    assert not (tmp_path / "head").exists()


def test_the_recipe_beside_the_head_is_the_one_that_ran(place, tmp_path):
    from mtp.recipe import load_recipe

    recipe = dataclasses.replace(tiny_recipe(steps=2))
    train(*place, tmp_path / "head", recipe)
    assert load_recipe(tmp_path / "head" / "recipe.toml") == recipe
    assert json.loads((tmp_path / "head" / "head.json").read_text())["provenance"]["tokens"] > 0
