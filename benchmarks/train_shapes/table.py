"""The cases of a session as a table: `table.py OUT/cases.jsonl`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEADINGS = (
    "case", "tokens a step", "tokens/s", "positions/s", "MFU", "peak GiB", "beyond", "gradients",
)  # fmt: skip


def row(case: dict) -> list[str]:
    """A case's cells; what went wrong instead, if it did."""
    if "error" in case:
        return [case["case"], case["error"][:80]]
    memory = case["memory_gib"]
    return [
        case["case"],
        f"{case['tokens_per_step']}",
        f"{case['tokens_per_second']:.0f}",
        f"{case['trained_positions_per_second']:.0f}",
        f"{case['mfu']:.3f}",
        f"{memory['peak']:.1f}",
        f"{memory['peak beyond weights and optimizer state']:.1f}",
        f"{memory['gradients']:.1f}",
    ]


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    print("| " + " | ".join(HEADINGS) + " |")
    print("|---" * len(HEADINGS) + "|")
    for line in lines:
        print("| " + " | ".join(row(json.loads(line))) + " |")
