"""history.jsonl: a header, then one JSON object an optimizer step, each step once.

`step` counts finished steps, so the first is 1. Records of steps after which acceptance was
measured also hold `mean_accepted` and `cumulative`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft.errors import UserError

HISTORY = "history.jsonl"
HISTORY_SCHEMA = 2  # 2: `step` counts finished steps; loss, learning_rate, tokens_per_second


def read_history(path: Path) -> list[dict[str, Any]]:
    """The steps of a history.jsonl; a last line that a kill cut short is left out.

    Raises:
        UserError: no such file, or not a history of this version.
    """
    expected = f"a history of schema {HISTORY_SCHEMA} in {path}"
    action = "name the folder of a run or of a head that this version trained"
    try:
        lines = path.read_text().split("\n")
        header, *records = [json.loads(line) for line in lines[:-1]] or [None]
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise UserError(expected, found, action) from error
    if not isinstance(header, dict) or header.get("schema_version") != HISTORY_SCHEMA:
        raise UserError(expected, str(header)[:80], action)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or record.get("step") != number or "loss" not in record:
            raise UserError(f"step {number} and its loss on line {number + 1} of {path}",
                            str(record)[:80], "restore it, or start a new run")  # fmt: skip
    return records


def flat_numbers(record: dict[str, Any]) -> dict[str, float]:
    """A record as trackers take it: positions as keys of their own, counted from 1."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat |= {f"{name}/{position}": item for position, item in enumerate(value, 1)}
        elif name != "step":
            flat[name] = value
    return flat
