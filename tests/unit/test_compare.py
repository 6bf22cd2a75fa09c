"""`mtp probe`'s bookkeeping, on made-up engine results; real engines are in tests/vllm."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny import write_base, write_tiny_head

from graft.errors import UserError
from graft.plan import plan_graft
from graft.writer import write_graft
from mtp.acceptance import AcceptanceCounts
from mtp.data.prompts import Prompt
from mtp.recipe import EvalRecipe
from mtp.serving import compare


@pytest.fixture
def served(tmp_path, monkeypatch):
    base = write_base(tmp_path / "base", nested=False, prefix="model.")
    head = write_tiny_head(tmp_path / "head", base)
    write_graft(plan_graft(base, tmp_path / "head"), tmp_path / "grafted")
    assert head
    prompts = [Prompt(id="a", category="code", token_ids=(1, 2)),
               Prompt(id="b", category="code", token_ids=(3,))]  # fmt: skip
    monkeypatch.setattr(compare, "evaluation_prompts", lambda *_, **__: prompts)
    state = {"routed_layers": 4, "outputs": [[5, 6], [7]], "asked": None}

    def run_probe(python, runs):
        state["asked"] = runs
        results = []
        for run in runs:
            result = {"name": run["name"], "outputs": [[5, 6], [7]], "routed_layers": 0}
            if run["num_speculative_tokens"]:
                counts = AcceptanceCounts(4, 10, [9, 6, 3, 1])
                result |= {"outputs": state["outputs"], **counts.as_dict()}
            if run["name"].endswith("/routed"):
                result["routed_layers"] = state["routed_layers"]
            results.append(result)
        return {"vllm_version": "0.0", "runs": results}

    monkeypatch.setattr(compare, "run_probe", run_probe)
    (tmp_path / "eval.json").write_text(
        json.dumps({"runtime": "routed", **AcceptanceCounts(4, 10, [9, 7, 4, 2]).as_dict()})
    )

    def go():
        return compare.compare_runtimes(
            {"BF16": tmp_path / "grafted"}, [("BF16", tmp_path / "eval.json")], tmp_path / "data",
            EvalRecipe(num_tokens=7), vllm_python=Path("python"),
        )  # fmt: skip

    return state, go


def test_asks_for_plain_stock_and_routed_with_one_token_a_layer(served):
    state, go = served
    go()
    asked = [(r["name"], r["num_speculative_tokens"], r.get("routing")) for r in state["asked"]]
    assert asked == [("plain", None, None), ("BF16/stock", 4, False), ("BF16/routed", 4, True)]
    assert all(r["prompts"] == [[1, 2], [3]] and r["max_tokens"] == 7 for r in state["asked"])


def test_one_layer_is_served_stock_with_the_tokens_it_was_trained_for(served, tmp_path):
    """It has nothing to route, and `mtp eval` predicted as many tokens."""
    state, go = served
    recipe = {"train": {"runtime": "stock", "num_speculative_tokens": 4}}
    head = write_tiny_head(
        tmp_path / "one", tmp_path / "base", num_layers=1, provenance={"recipe": recipe}
    )
    write_graft(plan_graft(tmp_path / "base", head), tmp_path / "grafted", overwrite=True)
    (tmp_path / "eval.json").write_text(
        json.dumps({"runtime": "stock", **AcceptanceCounts(4, 10, [9, 7, 4, 2]).as_dict()})
    )
    result = go()
    asked = [(r["name"], r["num_speculative_tokens"]) for r in state["asked"]]
    assert asked == [("plain", None), ("BF16/stock", 4)]
    labels = [label for label, _ in compare.table_rows(result)]
    assert labels == ["BF16 stock", "BF16 stock, predicted"]


def test_rows_come_in_order_with_the_prediction(served):
    _, go = served
    result = go()
    labels = [label for label, _ in compare.table_rows(result)]
    assert labels == ["BF16 stock", "BF16 routed", "BF16 routed, predicted"]
    assert [row["mean_accepted"] for row in result["rows"]] == pytest.approx([1.9, 1.9, 2.2])
    assert [row.get("same_tokens") for row in result["rows"]] == [2, 2, None]


def test_changed_tokens_are_counted(served):
    state, go = served
    state["outputs"] = [[5, 6], [8]]
    assert go()["rows"][0]["same_tokens"] == 1


def test_a_prediction_for_no_checkpoint_is_refused(served, tmp_path):
    with pytest.raises(UserError, match="NVFP4"):
        compare.compare_runtimes(
            {"BF16": tmp_path / "grafted"}, [("NVFP4", tmp_path / "eval.json")], tmp_path,
            EvalRecipe(), vllm_python=Path("python"),
        )  # fmt: skip


def test_an_engine_that_did_not_route_is_an_error(served):
    state, go = served
    state["routed_layers"] = 0
    with pytest.raises(UserError, match="layer 0 at every position"):
        go()
