"""Statistics against plain Python over the rows, by the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data_helpers import chat, make_base, write_jsonl
from typer.testing import CliRunner

from graft.errors import UserError
from mtp.cli import app
from mtp.data.prepare import prepare
from mtp.data.stats import as_text, plot_lengths, statistics
from mtp.data.store import load_prepared

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stats")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    agent = {"id": "agent", "tools": [TOOL], "messages": [
        {"role": "user", "content": "Go."}, call, {"role": "tool", "content": "r"}, call,
        {"role": "tool", "content": "r"}, {"role": "assistant", "content": "Done."},
    ]}  # fmt: skip
    (folder / "code").mkdir()
    (folder / "code" / "a.py").write_text("x = 1\n" * 40)
    rows = write_jsonl(folder / "a.jsonl", [*(chat(n) for n in range(20)), agent])
    base = make_base(folder / "base", "qwen35")
    prepare(base, [rows, folder / "code"], folder / "out", max_length=128, held_out_percent=0)
    return folder / "out"


def test_against_the_rows(prepared):
    result, lengths = statistics(prepared)
    rows = load_prepared(prepared)["train"].to_list()
    for name in ("agent", "chat", "code"):
        mine = [row for row in rows if row["category"] == name]
        counts = result["train"]["categories"][name]
        assert counts["rows"] == len(mine) > 0
        assert counts["tokens"] == sum(len(row["input_ids"]) for row in mine)
        assert counts["supervised_tokens"] == sum(sum(row["loss_mask"]) for row in mine)
    shares = {n: c["tool_call_share"] for n, c in result["train"]["categories"].items()}
    assert shares == {"agent": round(2 / 3, 4), "chat": 0.0, "code": None}
    assert result["train"]["categories"]["agent"]["replies"] == 3
    assert sorted(lengths["train"]) == sorted(len(row["input_ids"]) for row in rows)
    found = result["train"]["length_percentiles"]
    assert found["50"] == round(float(np.median([len(row["input_ids"]) for row in rows])))
    assert result["held_out"]["rows"] == 0 and "train agent" in as_text(result)


def test_the_command(prepared):
    run = CliRunner().invoke(app, ["data", "stats", str(prepared), "--json"])
    assert run.exit_code == 0 and json.loads(run.stdout) == statistics(prepared)[0]
    run = CliRunner().invoke(app, ["data", "stats", str(prepared)])
    assert "66.7%" in run.stdout


def test_plot(prepared, tmp_path):
    lengths = statistics(prepared)[1]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match="pip install matplotlib"):
            plot_lengths(lengths, tmp_path / "a.png")
        return
    plot_lengths(lengths, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="an image to write"):
        plot_lengths(lengths, tmp_path / "a.xyz")
