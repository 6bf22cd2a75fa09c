"""Memory that `mtp data prepare` needs for each row: collecting many, dealing and saving them.

No text is read or tokenised here, so that millions of rows take minutes: what a row leaves in
memory does not depend on its length. 625,000 rows of 8 kB are 5 GB of JSON Lines.

With `--tokens` as many as rows have, the files are as large as those of a real run, so that what
is mapped of them shows too.

Usage: python benchmarks/data/rows_memory.py --rows 625000 > OUT.jsonl
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
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

_REPLIES = 8
_SECONDS_BETWEEN = 0.02
_FIGURES = {"resident": "VmRSS", "anonymous": "RssAnon", "mapped_files": "RssFile"}


class Memory(threading.Thread):
    """Watches this process; prints a line of JSON for each stage, with the peaks inside it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._peaks: dict[str, int] = {}
        self.start()

    def run(self) -> None:
        """Look again and again."""
        while True:
            self._look()
            time.sleep(_SECONDS_BETWEEN)

    def stage(self, name: str, rows: int) -> None:
        """Print the peaks since the last stage, and what is held now."""
        now = self._look()
        peaks, self._peaks = self._peaks, {}
        figures = {f"peak_{figure}_mb": value for figure, value in peaks.items()}
        line = {"stage": name, "rows": rows, "resident_mb": now["resident"], **figures}
        print(json.dumps(line), flush=True)

    def _look(self) -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        kilobytes = {line.split(":")[0]: line.split()[1] for line in lines if " kB" in line}
        now = {figure: int(kilobytes[name]) // 1024 for figure, name in _FIGURES.items()}
        self._peaks = {name: max(self._peaks.get(name, 0), now[name]) for name in now}
        return now


def main() -> None:
    """Print the measurements, a line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=625_000)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--windows", type=int, default=1, help="cut from each row")
    options = parser.parse_args()
    num_rows, num_tokens = options.rows, options.tokens
    import datasets  # noqa: F401

    generator = np.random.default_rng(0)
    rules = Rules(held_out_percent=5, seed=0, near_duplicates="together", mix=MixRecipe())
    report, seen = PrepareReport(), DigestSet()
    report.by_source["rows"] = SourceCounts()
    mask = np.arange(num_tokens) >= num_tokens // 2
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        collected = Collected(out / ".rows", rules)
        memory = Memory()
        memory.stage("start", 0)
        for number in range(num_rows):
            seen.add(generator.bytes(32).hex())
            value = Conversation(messages=(), id=f"row-{number}")
            item = Item(source="rows", file="rows", line=number, format="rows", value=value)
            ids = generator.integers(50_000, size=num_tokens, dtype=np.int32)
            keys, beginnings = (
                generator.integers(1, 1 << 63, size=size, dtype=np.uint64)
                for size in (NUM_KEYS, _REPLIES)
            )
            window = Window(input_ids=ids, loss_mask=mask, num_replies=_REPLIES)
            outcome = Outcome(keys=keys, beginnings=beginnings, windows=[window] * options.windows)
            collected.add(item, "unknown", outcome)
            if (number + 1) % (num_rows // 4) == 0:
                memory.stage("collected", number + 1)
        copies = collected.deal(report)
        memory.stage("dealt", num_rows)
        collected.save(out / "data", copies)
        memory.stage("saved", num_rows)
        collected.close()


if __name__ == "__main__":
    main()
