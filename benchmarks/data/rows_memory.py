"""Memory that `mtp data prepare` needs for each row: collecting many, dealing and saving them.

No text is read or tokenised here, so that millions of rows take minutes: what a row leaves in
memory does not depend on its length. 625,000 rows of 8 kB are 5 GB of JSON Lines.

Usage: python benchmarks/data/rows_memory.py --rows 625000 > OUT.jsonl
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from mtp.data.conversation import Conversation
from mtp.data.dedup import NUM_KEYS, DigestSet
from mtp.data.report import PrepareReport, SourceCounts
from mtp.data.selection import Collected, Rules
from mtp.data.sources import Item
from mtp.data.windows import Window
from mtp.data.work import Outcome
from mtp.recipe import MixRecipe

_TOKENS, _REPLIES = 48, 8


def memory(stage: str, rows: int) -> None:
    """Print the resident set of this process and its peak so far, as a line of JSON."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if " kB" in line}
    line = {"stage": stage, "rows": rows, "resident_mb": found["VmRSS"], "peak_mb": found["VmHWM"]}
    print(json.dumps(line), flush=True)


def main() -> None:
    """Print the measurements, a line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=625_000)
    num_rows = parser.parse_args().rows
    import datasets  # noqa: F401

    generator = np.random.default_rng(0)
    rules = Rules(held_out_percent=5, seed=0, near_duplicates="together", mix=MixRecipe())
    report, seen = PrepareReport(), DigestSet()
    report.by_source["rows"] = SourceCounts()
    mask = np.arange(_TOKENS) >= _TOKENS // 2
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        collected = Collected(out / ".rows", rules)
        memory("start", 0)
        for number in range(num_rows):
            seen.add(generator.bytes(32).hex())
            value = Conversation(messages=(), id=f"row-{number}")
            item = Item(source="rows", file="rows", line=number, format="rows", value=value)
            ids = generator.integers(50_000, size=_TOKENS, dtype=np.int32)
            keys, beginnings = (
                generator.integers(1, 1 << 63, size=size, dtype=np.uint64)
                for size in (NUM_KEYS, _REPLIES)
            )
            window = Window(input_ids=ids, loss_mask=mask, num_replies=_REPLIES)
            outcome = Outcome(keys=keys, beginnings=beginnings, windows=[window])
            collected.add(item, "unknown", outcome)
            if (number + 1) % (num_rows // 4) == 0:
                memory("collected", number + 1)
        copies = collected.deal(report)
        memory("dealt", num_rows)
        collected.save(out / "data", copies)
        memory("saved", num_rows)
        collected.close()


if __name__ == "__main__":
    main()
