"""CPU milliseconds a row of each step of `mtp data prepare`, and of `datasets.map`'s two.

The steps take turns on few rows at a time, in one process with one thread, so that all meet the
same load. Reading and writing Arrow is left out on both sides.

Usage: RAYON_NUM_THREADS=1 python benchmarks/data/steps.py --base BASE --traces traces.jsonl > OUT
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speed import write_rows

from mtp.data.conversation import checked, content_digest, cut_at_mismatch
from mtp.data.dedup import beginning_keys, group_keys
from mtp.data.formats import recogniser
from mtp.data.mask import loss_mask, num_edge_tokens, render_rows
from mtp.data.plain_tokenizer import PlainTokenizer
from mtp.data.render import Renderer, load_tokenizer
from mtp.data.windows import conversation_windows

_AT_ONCE = 25


def baseline_row(line: str) -> Any:
    """A row as `datasets.map` is given it, see speed.py."""
    row = json.loads(line)
    for message in row["messages"]:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return row


class Steps:
    """Runs steps over rows and adds up their times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def run(self, name: str, step: Callable[[Any], Any], values: list[Any]) -> list[Any]:
        """What the step makes of each value."""
        started = time.process_time()
        results = [step(value) for value in values]
        self.seconds[name] += time.process_time() - started
        return results


def masks(part: Any) -> Any:
    """Windows and masks of a row."""
    (row,), (ids, offsets) = part
    windows = conversation_windows(row, ids, offsets, max_length=1 << 20)
    return windows, loss_mask(offsets, row.replies), num_edge_tokens(offsets, row.replies)


def main() -> None:
    """Print the times as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1000)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.base)
    renderer, formats = Renderer(PlainTokenizer.of(tokenizer), num_checked=0), recogniser()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "rows.jsonl"
        write_rows(options.traces, source, options.rows)
        lines = source.read_text(encoding="utf-8").splitlines()
    theirs, ours = Steps(), Steps()
    for start in range(0, len(lines), _AT_ONCE):
        some = lines[start : start + _AT_ONCE]
        rows = theirs.run("parse JSON", baseline_row, some)
        texts = theirs.run(
            "render once",
            lambda row: tokenizer.apply_chat_template(
                row["messages"], tools=row["tools"], tokenize=False
            ),
            rows,
        )
        theirs.run("tokenise", lambda t: tokenizer(t, add_special_tokens=False)["input_ids"], texts)
        rows = ours.run("parse JSON", json.loads, some)
        read = ours.run("recognise and read", lambda row: formats.read(row)[1], rows)
        ours.run("digest", content_digest, read)
        sent = ours.run("send to a worker", lambda r: pickle.loads(pickle.dumps(r)), [read])[0]
        fit = ours.run("check", lambda item: checked(cut_at_mismatch(item)), sent)
        rendered = ours.run("render all prefixes", lambda c: render_rows(c, renderer), fit)
        encoded = ours.run(
            "tokenise with positions",
            lambda all_rows: renderer.encode([row.text for (row,) in all_rows]),
            [rendered],
        )[0]
        ours.run("masks and windows", masks, list(zip(rendered, encoded, strict=True)))
        ours.run("near-duplicate keys", group_keys, fit)
        ours.run("beginnings", beginning_keys, fit)
    result = {
        name: {step: round(1000 * time / len(lines), 3) for step, time in steps.seconds.items()}
        for name, steps in (("datasets.map", theirs), ("prepare", ours))
    }
    totals = {name: round(sum(steps.values()), 3) for name, steps in result.items()}
    machine = {"load_average": os.getloadavg(), "rows": len(lines)}
    print(json.dumps({"schema_version": 1, **machine, "totals": totals, **result}, indent=1))


if __name__ == "__main__":
    main()
