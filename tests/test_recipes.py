"""Every recipe loads, and a wrong one is refused by name."""

from pathlib import Path

import pytest

from graft.errors import UserError
from mtp.recipe import LossStage, Recipe, load_recipe

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
        ("[loss]\nposition_wieghts = [1]\n", "key position_weights"),
        ("[lost]\nkl = 1\n", "key loss"),
        ("[train]\nzzz = 1\n", "a key of runtime, "),
        ("[loss]\nposition_weights = 1.0\n", "as a list"),
        ("[loss]\nposition_weights = ['a']\n", "position_weights of type float"),
        ("[loss]\nposition_weights = [0, 0]\n", "a position weight above 0"),
        ("[loss]\nposition_weights = [1, 1]\n", "4 position_weights"),
        ("[loss]\ncategory_weights = 3\n", r"a table \[category_weights\]"),
        ("[loss.category_weights]\ncode = 'much'\n", "code of type float"),
        ("[loss]\nkl = 0\nce = 0\n", "a term above 0"),
        ("[[loss.schedule]]\nkl = 1\nuntil = 0.5\n", "until"),
        ("[[loss.schedule]]\nuntil = 1\n", "a term above 0"),
        (
            "[[loss.schedule]]\nkl = 1\nuntil = 0.5\n[[loss.schedule]]\nlk = 1\nuntil = 0.5\n",
            "rising",
        ),
        ("[[loss.schedule]]\ne2etv = 1\n", "key e2e_tv"),
        ("[train]\nlr = 1\n", "key learning_rate"),
        ("[train]\nlearning_rate = inf\n", "learning_rate, a number above 0"),
        ("[loss]\nkl = inf\n", "kl, a number of 0 or more"),
        ("[train]\nseed = 99999999999999999999\n", "seed"),
        ("[train]\nmin_learning_rate = 1\n", "min_learning_rate of at most"),
        ("[train]\nnum_speculative_tokens = 2\n", "at least head.num_layers, 4"),
    ],
)
def test_wrong_recipe_is_refused_by_name(tmp_path, text, named):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=named):
        load_recipe(path)


def test_a_file_of_no_text_is_no_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="a recipe in TOML"):
        load_recipe(path)


def test_a_stock_head_may_draft_fewer_tokens_than_it_has_layers():
    """Only its first layer runs, and is repeated. A DSpark draft does not read these keys."""
    for settings in (["train.runtime=stock"], ["train.draft=dspark"]):
        load_recipe(None, [*settings, "train.num_speculative_tokens=2"])


def test_a_recorded_recipe_names_an_earlier_head_and_not_its_place():
    recorded = load_recipe(None, ["head.warm_start=/home/me/heads/v1"]).as_record()
    assert recorded["head"]["warm_start"] == "v1"
    assert load_recipe(None).as_record()["head"]["warm_start"] == "auto"


def test_missing_recipe_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml"):
        load_recipe(tmp_path / "none.toml")


def test_whole_numbers_are_welcome_as_floats(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[loss]\nkl = 2\n")
    assert load_recipe(path).loss.kl == 2.0


def test_nested_tables_and_lists_are_read(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        "[head]\nnum_layers = 2\n"
        "[loss]\nposition_weights = [1, 0.5]\n[loss.category_weights]\ncode = 2\n"
        "[[loss.schedule]]\nkl = 1\nuntil = 0.25\n[[loss.schedule]]\ne2e_tv = 1\n"
    )
    loss = load_recipe(path).loss
    assert loss.position_weights == (1.0, 0.5)
    assert loss.category_weights == {"code": 2.0}
    assert loss.schedule == (LossStage(kl=1.0, until=0.25), LossStage(e2e_tv=1.0, until=1.0))
