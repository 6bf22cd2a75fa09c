"""The picture of a run, and what it is drawn from."""

import json
import sys

import pytest

from graft.errors import UserError
from mtp.history import HISTORY_SCHEMA
from mtp.plots import panels, plot_run

RECORDS = [
    {"step": step, "loss": 3 / step, "loss_per_position": [2 / step, 4 / step],
     "gradient_norm": 0.5, "learning_rate": 1e-3}
    | ({"cumulative": [0.5, 0.25]} if step % 2 == 0 else {})
    for step in range(1, 6)
]  # fmt: skip


def write(folder, records, schema=HISTORY_SCHEMA):
    lines = [json.dumps({"schema_version": schema}), *map(json.dumps, records)]
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_curves_are_the_histories_numbers():
    loss, acceptance, norm, rate = panels(RECORDS)
    assert loss[1][1] == ("position 2", [1, 2, 3, 4, 5], [4.0, 2.0, 4 / 3, 1.0, 0.8])
    assert acceptance[1][0] == ("position 1", [2, 4], [0.5, 0.5])
    assert norm[1][0][2] == [0.5] * 5 and rate[1][0][2] == [1e-3] * 5


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = plot_run(write(tmp_path, RECORDS))
    assert path == tmp_path / "curves.png" and path.read_bytes().startswith(b"\x89PNG")
    assert plot_run(tmp_path, tmp_path / "a" / "b.png").stat().st_size > 10_000


def test_what_cannot_be_drawn_is_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"history\.jsonl"):
        plot_run(tmp_path)
    for other in ("curves.jpg", "."):
        with pytest.raises(UserError, match=r"\.png"):
            plot_run(write(tmp_path, RECORDS), tmp_path / other)
    with pytest.raises(UserError, match="train first"):
        plot_run(write(tmp_path, []))
    with pytest.raises(UserError, match="schema"):
        plot_run(write(tmp_path, RECORDS, schema=1))
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot_run(write(tmp_path, RECORDS))
