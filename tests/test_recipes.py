"""Every recipe loads, and a wrong one is refused by name."""

from pathlib import Path

import pytest

from graft.errors import UserError
from mtp.recipe import Recipe, load_recipe

RECIPES = sorted((Path(__file__).parent.parent / "recipes").rglob("*.toml"))


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_recipe_loads(path):
    assert load_recipe(path) != Recipe()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[train]\nstepz = 3\n", "stepz"),
        ("[trian]\nsteps = 3\n", "trian"),
        ("[train]\nsteps = 'three'\n", "steps"),
        ("[train]\nsteps = true\n", "steps"),
        ("train = 3\n", "train"),
        ("[train]\nlearning_rate = 0\n", "learning_rate above 0"),
        ("[train]\nsteps = -1\n", "steps of 0 or more"),
        ("[loss]\nposition_decay = nan\n", "position_decay"),
        ("[train\n", "TOML"),
    ],
)
def test_wrong_recipe_is_refused_by_name(tmp_path, text, named):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=named):
        load_recipe(path)


def test_missing_recipe_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml"):
        load_recipe(tmp_path / "none.toml")


def test_whole_numbers_are_welcome_as_floats(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[loss]\nkl = 2\n")
    assert load_recipe(path).loss.kl == 2.0
