"""Rows whose last answer is the base's own: `python own_answers.py WORK [--rows 9000] [--cpu]`.

Training rows of WORK/data are cut where a prompt of `evaluation_prompts` would end, one cut a row,
and the base goes on from there, up to 200 tokens, half of the rows greedily and half at temperature
0.6, as they are served. WORK/data-own holds these rows, with the row's own mask up to the cut and
all of the answer supervised, and the held-out rows of WORK/data. The same as `mtp data regenerate`
does for conversations (their last turn only), and for documents, which that leaves alone.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "routing_h200"))

import worker
from serve_head import MAX_TOKENS
from variants import engine_options

from mtp.data.prompts import row_prompts
from mtp.data.store import MANIFEST, RowWriter, load_prepared
from mtp.serving.probe import end_tokens

CONCURRENCY, MAX_PROMPT_TOKENS = 256, 768
TEMPERATURES = (0.0, 0.6)


def cut_rows(rows: Any, wanted: int) -> list[dict[str, Any]]:
    """Up to `wanted` rows, each up to one of its prompts' ends."""
    generator = random.Random(0)
    order = list(range(len(rows)))
    generator.shuffle(order)
    cut = []
    for index in order:
        row = rows[index]
        if prompts := row_prompts(row, MAX_PROMPT_TOKENS):
            end = len(generator.choice(prompts).token_ids)
            cut.append(row | {name: row[name][:end] for name in ("input_ids", "loss_mask")})
        if len(cut) == wanted:
            break
    return cut


def answered(row: dict[str, Any], answer: list[int]) -> dict[str, Any]:
    """The row with the base's answer; plain Python values, since the cut ones are numpy's."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()
             if name not in ("input_ids", "loss_mask")}  # fmt: skip
    mask = [bool(value) for value in row["loss_mask"]] + [True] * len(answer)
    return plain | {"input_ids": [*map(int, row["input_ids"]), *answer], "loss_mask": mask}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--rows", type=int, default=9000)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    work = given.work.resolve()
    splits = load_prepared(work / "data")
    rows = cut_rows(splits["train"].with_format("numpy"), given.rows)
    common, _, eager = engine_options("trained", given.cpu)
    engine = common | eager | {"max_num_seqs": CONCURRENCY}
    spec = {"checkpoint": str(work / "base"), "num_speculative_tokens": 0, "engine": engine}
    llm, made = worker.start(spec), []
    for place, temperature in enumerate(TEMPERATURES):
        asked = rows[place :: len(TEMPERATURES)]
        prompts = [row["input_ids"].tolist() for row in asked]
        found = worker.generate(
            llm, prompts, CONCURRENCY, MAX_TOKENS, end_tokens(work / "base"), temperature
        )
        made += [answered(*pair) for pair in zip(asked, found["outputs"], strict=True) if pair[1]]
        print(f"temperature {temperature}: {sum(map(len, found['outputs']))} tokens of",
              f"{len(asked)} rows in {found['seconds']:.0f} s", flush=True)  # fmt: skip
    staging = work / "data-own.partial"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    writer = RowWriter(staging / "rows")
    for row in [*made, *(answered(row, []) for row in splits["held_out"])]:
        writer.add(**row)
    train = np.arange(writer.num_rows) < len(made)
    writer.save(staging, {"train": train.astype(np.int64), "held_out": (~train).astype(np.int64)})
    manifest = json.loads((work / "data" / MANIFEST).read_text())
    manifest["settings"]["own_answers"] = {"rows": len(made), "temperatures": TEMPERATURES}
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
    staging.rename(work / "data-own")


if __name__ == "__main__":
    main()
