"""Keys of a recipe that decide an optimizer step, seen in what the loop leaves behind.

A key that is read and then not used would change nothing that other tests look at.
"""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import tiny_recipe, write_training_base, write_training_data

from mtp.dspark import draft as dspark_draft
from mtp.history import read_history
from mtp.recipe import DSparkRecipe
from mtp.schedule import learning_rate_factor
from mtp.train import train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    base = write_training_base(folder / "base")
    return base, write_training_data(folder / "data", base)


def recipe_of(**settings):
    return tiny_recipe(**{"steps": 9, "eval_every": 0, "checkpoint_every": 0, **settings})


def state_after(place, out, recipe, steps):
    """Weights and optimizer state after so many steps."""
    train(*place, out, recipe, max_steps=steps)
    (folder,) = (out.parent / f"{out.name}.run" / "checkpoints").iterdir()
    return {k: v for shard in folder.glob("*.safetensors") for k, v in load_file(shard).items()}


def test_each_step_takes_the_schedules_learning_rate(place, tmp_path):
    """The first step that of the factor's step 0; a stop in between moves nothing."""
    recipe = recipe_of(warmup_steps=3, min_learning_rate=1e-4)
    for last in (2, 6):
        train(*place, tmp_path / "head", recipe, max_steps=last, resume=True, overwrite=True)
    peak = recipe.train.learning_rate
    found = [r["learning_rate"] for r in read_history(tmp_path / "head" / "history.jsonl")]
    assert found == [peak * learning_rate_factor(recipe.train, step) for step in range(6)]
    assert found[:3] == pytest.approx([peak / 3, peak * 2 / 3, peak])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_gradient_is_clipped(place, tmp_path, optimizer):
    """AdamW hides the size of a gradient, its first moment does not."""
    recipe = recipe_of(max_gradient_norm=1e-3, optimizer=optimizer)
    state = state_after(place, tmp_path / "head", recipe, 1)
    share = {"exp_avg": 0.1, "momentum_buffer": 0.05}  # of the first gradient
    gradients = [v / share[k.split("/")[0]] for k, v in state.items() if k.split("/")[0] in share]
    assert float(torch.stack([g.norm() for g in gradients]).norm()) == pytest.approx(1e-3, rel=1e-3)
    (record,) = read_history(tmp_path / "head" / "history.jsonl")
    assert record["gradient_norm"] > 1e-2  # as it was before


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_decay(place, tmp_path, optimizer):
    """By learning rate times decay of what they were, whatever the gradient."""
    settings = {"optimizer": optimizer, "warmup_steps": 0}
    plain = state_after(place, tmp_path / "plain", recipe_of(**settings), 1)
    decayed, twice = (
        state_after(place, tmp_path / f"{decay}", recipe_of(weight_decay=decay, **settings), 1)
        for decay in (10.0, 20.0)
    )
    names = [name for name in plain if name.startswith("weight/")]
    moved = [name for name in names if not torch.equal(plain[name], decayed[name])]
    assert len(moved) > len(names) / 2  # norms start at 0
    for name in names:
        once, both = plain[name] - decayed[name], plain[name] - twice[name]
        torch.testing.assert_close(both, 2 * once, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("trained", [True, False])
def test_routers_learn_or_stay(place, tmp_path, trained):
    recipe = recipe_of()
    recipe = dataclasses.replace(
        recipe, head=dataclasses.replace(recipe.head, train_router=trained)
    )
    first, later = (state_after(place, tmp_path / f"{n}", recipe, n) for n in (1, 3))
    routers = [name for name in first if name.startswith("weight/") and "mlp.gate." in name]
    assert len(routers) == 2
    assert all(torch.equal(first[name], later[name]) != trained for name in routers)
    experts = next(name for name in first if name.endswith("experts.down_proj"))
    assert not torch.equal(first[experts], later[experts])


def test_a_drafts_blocks_are_drawn_anew_each_step_and_again_after_a_stop(
    place, tmp_path, monkeypatch
):
    real, seeds = dspark_draft.choose_blocks, []

    def choose_blocks(*arguments, seed, **options):
        seeds.append(seed)
        return real(*arguments, seed=seed, **options)

    monkeypatch.setattr(dspark_draft, "choose_blocks", choose_blocks)
    settings = DSparkRecipe(
        num_layers=1, block_size=4, num_speculative_tokens=3, draft_vocab_size=10,
        sliding_window=16, mask_token_id=15, markov_rank=4,
    )  # fmt: skip
    recipe = dataclasses.replace(recipe_of(draft="dspark", seed=7), dspark=settings)
    for last in (2, 3):
        train(*place, tmp_path / "draft", recipe, max_steps=last, resume=True, overwrite=True)
    assert list(dict.fromkeys(seeds)) == [7, 8, 9]
