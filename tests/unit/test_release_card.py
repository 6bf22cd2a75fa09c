"""The model card says what the manifest says."""

from __future__ import annotations

import pytest
from tiny import write_base, write_tiny_head

from graft.plan import plan_graft
from graft.writer import write_graft
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
