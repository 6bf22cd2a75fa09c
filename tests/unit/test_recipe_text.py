"""Recipes overridden on the command line, and written out."""

import dataclasses
from pathlib import Path

import pytest

from graft.errors import UserError
from mtp.recipe import HeadRecipe, LossRecipe, LossStage, Recipe, load_recipe
from mtp.recipe_text import dump_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.toml"))
FULL = Recipe(
    head=HeadRecipe(num_layers=2),
    loss=LossRecipe(
        kl=0.0,
        tv=0.5,
        position_weights=(1.0, 0.25),
        category_weights={"agent": 2.0, 'a "quoted" one': 0.5, "😀\x7f": 1.0},
        schedule=(LossStage(kl=1.0, until=0.5), LossStage(e2e_tv=1.0)),
    ),
)


@pytest.mark.parametrize("recipe", [Recipe(), FULL, *map(load_recipe, RECIPES)])
def test_what_is_written_reads_back_as_the_same_recipe(recipe, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


def test_an_override_is_stronger_than_the_file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\nsteps = 3\nseed = 4\n")
    recipe = load_recipe(
        path,
        ["train.steps=7", "train.learning_rate=3e-4", "head.warm_start=last",
         "train.activation_checkpointing=true", "train.optimizer='muon'",
         "loss.category_weights={agent=2.0}", "train.steps = 8"],
    )  # fmt: skip
    assert recipe.train.steps == 8 and recipe.train.seed == 4
    assert recipe.train.learning_rate == 3e-4 and recipe.head.warm_start == "last"
    assert recipe.train.activation_checkpointing and recipe.train.optimizer == "muon"
    assert recipe.loss.category_weights == {"agent": 2.0}


@pytest.mark.parametrize("table", [field.name for field in dataclasses.fields(Recipe)])
def test_every_key_can_be_set(table):
    for field in dataclasses.fields(getattr(Recipe(), table)):
        value = getattr(getattr(FULL, table), field.name)
        if isinstance(value, bool | int | float | str):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            recipe = load_recipe(None, [f"{table}.{field.name}={text}"])
            assert getattr(getattr(recipe, table), field.name) == value


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("train.learning_rat=1", "learning_rate"),
        ("trian.steps=1", "train"),
        ("train.steps=many", "steps"),
        ("train.steps=-1", "steps"),
        ("train.optimizer=adam", "adamw"),
        ("train.steps", "TABLE.KEY=VALUE"),
        ("steps=3", "TABLE.KEY=VALUE"),
        ("train.steps.more=3", "steps"),
    ],
)
def test_a_wrong_override_is_refused_by_name(assignment, named):
    with pytest.raises(UserError, match=named):
        load_recipe(None, ["train.steps=5", assignment])
