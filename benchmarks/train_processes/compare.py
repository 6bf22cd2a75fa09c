"""Loss curves of `session.sh` beside that of one process: `python compare.py RUNS OUT.json`.

Largest relative differences over the steps. Training is float32 weights with bfloat16 arithmetic on
a GPU, so the yardsticks are runs that differ in order alone: one process again, and one process
with its batch in a single pass.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mtp.history import read_history

NAMES = ("one-again", "whole-batch", "replicated", "sharded")
FIGURES = ("loss", "gradient_norm")


def difference(left: list[Any], right: list[Any], name: str) -> float:
    """Largest relative difference of a figure."""
    pairs = zip(left, right, strict=True)
    return max(abs(b[name] / a[name] - 1) for a, b in pairs)


def main(runs: Path, out: Path) -> None:
    one = read_history(runs / "one" / "history.jsonl")
    report: dict[str, Any] = {"schema_version": 1, "steps": len(one), "runs": {}}
    report["loss"] = [one[0]["loss"], one[-1]["loss"]]
    for name in NAMES:
        if not (runs / name / "history.jsonl").exists():
            continue
        history = read_history(runs / name / "history.jsonl")
        rows = {figure: difference(one, history, figure) for figure in FIGURES}
        rows["first_loss"] = difference(one[:1], history[:1], "loss")
        rows["tokens_equal"] = [r["tokens"] for r in one] == [r["tokens"] for r in history]
        rows["tokens_per_second"] = history[-1]["tokens_per_second"]
        report["runs"][name] = rows
        print(name, rows)
    report["histories"] = {
        path.parent.name: read_history(path) for path in sorted(runs.glob("*/history.jsonl"))
    }
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
