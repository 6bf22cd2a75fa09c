"""The model card says what the manifest says."""

from __future__ import annotations

import pytest
from tiny import write_base, write_tiny_head

from graft.plan import plan_graft
from graft.writer import write_graft
from mtp.acceptance import AcceptanceCounts
from mtp.data.store import licences_by_source
from mtp.release.card import render_card


@pytest.mark.parametrize("seed", [0, 5])
def test_an_allowed_mismatch_reaches_the_card(tmp_path, seed):
    base = write_base(tmp_path / "base")
    trained_on = write_base(tmp_path / "other", seed=seed)
    plan = plan_graft(base, write_tiny_head(tmp_path / "head", trained_on), allow_mismatch=True)
    out = write_graft(plan, tmp_path / "out").out
    card = render_card(
        out, name="me/model", license_id="mit", base_model=None, evaluation=None, served=None,
        tool="test",
    )  # fmt: skip
    assert ("ANOTHER base" in card) is (seed != 0)
    assert ("embed_tokens: head was trained on" in card) is (seed != 0)


def test_one_layer_trained_for_a_stock_vllm_is_served_as_it_was_trained(tmp_path):
    base = write_base(tmp_path / "base")
    recipe = {"train": {"runtime": "stock", "num_speculative_tokens": 3}}
    head = write_tiny_head(tmp_path / "head", base, num_layers=1, provenance={"recipe": recipe})
    out = write_graft(plan_graft(base, head), tmp_path / "out").out
    metrics = {"num_prompts": 2, **AcceptanceCounts(3, 10, [9, 7, 4]).as_dict()}
    card = render_card(
        out, name="me/model", license_id="mit", base_model=None, evaluation=metrics, served=None,
        tool="test",
    )  # fmt: skip
    assert '"num_speculative_tokens": 3}' in card and "of 3 tokens a round" in card
    assert "| | mean accepted | pos 1 | pos 2 | pos 3 | drafts |\n|---|---|---|---|---|---|" in card
    assert "pip install" not in card and "1 times" not in card


def test_licences_of_each_source_reach_the_card(tmp_path):
    sources = {
        "/home/me/secret/traces.jsonl": {"licences": {"MIT": 2, "unknown": 1}},
        "/elsewhere/traces.jsonl": {"licences": {"MIT": 5}},
        "hub:owner/name?split=train": {"licences": {"CC-BY-4.0": 7}},
        "empty": {"licences": {}},
    }
    licences = licences_by_source({"report": {"by_source": sources}})
    base = write_base(tmp_path / "base")
    provenance = {"licences": ["MIT"], "licences_by_source": licences}
    head = write_tiny_head(tmp_path / "head", base, provenance=provenance)
    out = write_graft(plan_graft(base, head), tmp_path / "out").out
    card = render_card(
        out, name="me/model", license_id="mit", base_model=None, evaluation=None, served=None,
        tool="test",
    )  # fmt: skip
    assert "- `hub:owner/name?split=train`: CC-BY-4.0 (7 conversations)\n" in card
    assert "- `traces.jsonl`: MIT (7 conversations), unknown (1 conversations)\n" in card
    assert "secret" not in card and "empty" not in card
