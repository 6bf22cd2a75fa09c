"""The draft behind the trainer: shares, resume to the bit, what is written, what is measured."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from command_line import run
from training import tiny_recipe, write_training_base, write_training_data

from graft.errors import UserError
from graft.manifest import file_digest
from graft.reader import Checkpoint
from mtp.data.store import load_prepared
from mtp.dspark.draft import DSparkDraft
from mtp.dspark.evaluate import evaluate_folder
from mtp.dspark.export import load_draft
from mtp.held_out import held_out_text
from mtp.optimizer import is_muon
from mtp.recipe import DSparkRecipe, load_recipe
from mtp.schedule import StepBatches
from mtp.teacher import Teacher
from mtp.train import train

SETTINGS = DSparkRecipe(
    num_layers=2, block_size=4, num_speculative_tokens=3, draft_vocab_size=10, aux_layers=(1, 2),
    full_attention_layers=(1,), sliding_window=16, mask_token_id=15, markov_rank=4, max_anchors=5,
    eval_rows=3,
)  # fmt: skip


def recipe_of(**train):
    recipe = tiny_recipe(draft="dspark", **train)
    return replace(recipe, dspark=SETTINGS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_training_base(tmp_path_factory.mktemp("dspark") / "base")


@pytest.fixture(scope="module")
def data(base):
    return write_training_data(base.parent / "data", base)


@pytest.fixture(scope="module")
def draft(base, data):
    torch.manual_seed(0)
    teacher, recipe = Teacher.load(base, device="cpu"), recipe_of()
    text = held_out_text(teacher, base, data, recipe)
    rows = load_prepared(data)["train"]
    return DSparkDraft.from_base(Checkpoint(base), teacher, recipe, text, rows)


@pytest.fixture(scope="module")
def trained(base, data):
    out = base.parent / "draft"
    return out, train(base, data, out, recipe_of(), device="cpu")


def batches_of(data):
    return StepBatches(load_prepared(data)["train"], recipe_of().train)


def test_shares_of_micro_batches_add_up_to_the_batch(draft, data):
    """Anchors are drawn by row, so cutting the batch does not change them."""
    torch.manual_seed(7)
    (batch,) = batches_of(data).micro_batches(0)
    totals = draft.target_weights(batch)
    whole, statistics = draft(batch, totals, 0.0)
    parts = []
    for row in range(len(batch.rows)):
        one = type(batch)(
            input_ids=batch.input_ids[row : row + 1], loss_mask=batch.loss_mask[row : row + 1],
            lengths=batch.lengths[row : row + 1], categories=batch.categories[row : row + 1],
            rows=batch.rows[row : row + 1],
        )  # fmt: skip
        parts.append((one, *draft(one, totals, 0.0)))
    torch.testing.assert_close(sum(loss for _, loss, _ in parts), whole, rtol=1e-5, atol=0)
    for name, wanted in statistics.items():
        found = sum(shares[name] for _, _, shares in parts)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert torch.equal(sum(draft.target_weights(one) for one, _, _ in parts), totals)
    torch.manual_seed(8)
    assert draft(batch, draft.target_weights(batch), 0.0)[0] != whole


def test_a_batch_without_targets_gives_zero_and_reaches_every_weight(draft, data):
    batch = next(batches_of(data).micro_batches(0)).without_targets()
    loss, _ = draft(batch, torch.ones(4), 0.0)
    loss.backward()
    assert loss == 0
    trained = [p for p in draft.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in trained)
    assert not draft.model.lm_head.weight.requires_grad
    draft.zero_grad(set_to_none=True)


def test_what_a_draft_starts_from(draft, base):
    """Rows of the base's output for the tokens it can say; the base's norm, which counts from 1."""
    checkpoint, kept = Checkpoint(base), draft._measured.vocabulary.kept
    lm_head = checkpoint.load("lm_head.weight").float()
    torch.testing.assert_close(draft.model.lm_head.weight.detach(), lm_head[kept])
    norm = checkpoint.load("model.norm.weight").float()
    torch.testing.assert_close(draft.model.norm.weight.detach(), 1 + norm)
    spreads = {"fc.weight": draft.model.config.initializer_range}
    spreads |= {"markov_head.markov_w1.weight": 0.01}  # as speculators 0.9.0 starts it
    for name, spread in spreads.items():
        assert float(draft.model.get_parameter(name).std()) == pytest.approx(spread, rel=0.3), name
    assert len(kept) == 10


def test_a_run_that_was_stopped_and_resumed_ends_in_the_same_bytes(base, data, trained):
    out = base.parent / "stopped"
    train(base, data, out, recipe_of(), device="cpu", max_steps=5)
    train(base, data, out, recipe_of(), device="cpu", resume=True, overwrite=True)
    one, other = (load_file(folder / "model.safetensors") for folder in (trained[0], out))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    fresh = load_file(trained[0] / "model.safetensors")["fc.weight"]
    assert not torch.equal(fresh, torch.zeros_like(fresh))


def test_the_folder_reads_back_and_measures_as_it_did(base, data, trained):
    out, summary = trained
    recipe = replace(recipe_of(), dspark=replace(SETTINGS, max_anchors=0))
    metrics = evaluate_folder(base, out, data, recipe, device="cpu")
    for name in ("mean_accepted", "cumulative", "num_drafts"):
        assert metrics[name] == pytest.approx(summary["after"][name]), name
    forced, before = metrics["teacher_forced"], summary["after"]["teacher_forced"]
    for name in ("accept_len", "position_acc", "calibration_error", "missed_mass"):
        assert forced[name] == pytest.approx(before[name]), name
    assert len(metrics["cumulative"]) == 3
    assert metrics["validation"]["num_rows"] == 3
    # Of each row the last 13 of 40 tokens are supervised; the last 4 start no block.
    assert metrics["validation"]["num_blocks"] == 3 * (13 - 4)
    assert 1 <= metrics["validation"]["accept_len"] <= 5
    assert summary["best_step"] in (4, 8, 12)


def test_blocks_of_one_and_a_vocabulary_as_large_as_the_bases(base, data, tmp_path):
    """A draft vocabulary beyond the base's is the base's, and needs no mapping."""
    settings = replace(SETTINGS, block_size=1, num_speculative_tokens=1, draft_vocab_size=100)
    recipe = replace(recipe_of(steps=1), dspark=settings)
    train(base, data, tmp_path / "one", recipe, device="cpu")
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert stored["lm_head.weight"].shape[0] == 16 and not {"d2t", "t2d"} & stored.keys()
    metrics = evaluate_folder(base, tmp_path / "one", data, recipe, device="cpu")
    assert len(metrics["cumulative"]) == 1
    assert 0 <= metrics["teacher_forced"]["missed_mass"] < 1e-5
    assert metrics["draft_sha256"] == file_digest(tmp_path / "one" / "model.safetensors")


def test_prompts_that_give_no_draft_measure_nothing(base, data, trained, tmp_path):
    recipe = recipe_of(steps=1)
    recipe = replace(recipe, eval=replace(recipe.eval, num_tokens=1))
    with pytest.raises(UserError, match=r"raise eval\.num_tokens"):
        evaluate_folder(base, trained[0], data, recipe, device="cpu")
    with pytest.raises(UserError, match=r"raise eval\.num_tokens"):
        train(base, data, tmp_path / "none", recipe, device="cpu")


def test_a_draft_of_another_base_is_refused(trained, data, tmp_path):
    other = write_training_base(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] = 1e-5
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="draft was trained on"):
        load_draft(trained[0], Checkpoint(other))
    load_draft(trained[0])


def test_a_draft_brings_its_learning_rate_unless_the_recipe_has_one(tmp_path):
    assert load_recipe(None).train.learning_rate == 5e-5
    assert load_recipe(None, ["train.draft=dspark"]).train.learning_rate == 3e-4
    path = tmp_path / "recipe.toml"
    path.write_text('[train]\ndraft = "dspark"\nlearning_rate = 1e-3\n')
    assert load_recipe(path).train.learning_rate == 1e-3


def test_the_commands_from_training_to_release(base, data, tmp_path):
    recipe, draft, report = tmp_path / "r.toml", tmp_path / "draft", tmp_path / "eval.json"
    recipe.write_text(
        "[dspark]\nnum_layers = 1\nblock_size = 4\nnum_speculative_tokens = 3\n"
        "draft_vocab_size = 10\naux_layers = [1, 2]\nmask_token_id = 15\nmarkov_rank = 4\n"
        "eval_rows = 2\n[train]\nsteps = 2\ntokens_per_batch = 160\n"
        "[eval]\nnum_prompts = 1\nmax_prompt_tokens = 40\nnum_tokens = 4\n"
    )
    where = ("--base", base, "--data", data, "--recipe", recipe, "--device", "cpu")
    run("train", "--draft", "dspark", *where, "--out", draft)
    assert "learning_rate = 0.0003" in (draft / "recipe.toml").read_text()
    run("eval", "--draft", draft, *where, "--report", report)
    assert len(json.loads(report.read_text())["cumulative"]) == 3
    run(
        "release", "draft", "--draft", draft, "--base", base, "--out", tmp_path / "release",
        "--name", "me/d", "--base-name", "me/m", "--license", "mit",
        "--license-file", recipe, "--evaluation", report,
    )  # fmt: skip
    assert "does nothing alone" in (tmp_path / "release" / "README.md").read_text()


def test_muon_takes_maps_and_leaves_tables_and_classifiers(draft):
    named = dict(draft.named_parameters())
    taken = {name.removeprefix("model.") for name, p in named.items() if is_muon(name, p)}
    assert "fc.weight" in taken and "markov_head.markov_w2.weight" in taken
    assert not {"markov_head.markov_w1.weight", "confidence_head.proj.weight"} & taken
