"""Rows a second of `mtp data prepare` beside a single-process `datasets.map` of one template.

The baseline renders each conversation once with the same chat template and tokenises it; it makes
no masks, windows, split or report. Both start from JSON Lines on disk and end with rows on disk.
All variants run alternately in one process tree, so that they meet the same load. Beside the wall
clock the CPU seconds of the whole tree are counted: on a machine with other work they tell more.

Usage: python benchmarks/data/speed.py --base BASE --traces traces.jsonl --rows 2000 > OUT.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp.data.prepare import prepare


def write_rows(traces: Path, out: Path, count: int) -> None:
    """The recorded conversations over and over, each time with another first request."""
    rows = [json.loads(line) for line in traces.read_text(encoding="utf-8").splitlines()]
    with out.open("w", encoding="utf-8") as stream:
        for number in range(count):
            row = json.loads(json.dumps(rows[number % len(rows)]))
            user = next(m for m in row["messages"] if m["role"] == "user")
            user["content"] += f" (request {number})"
            stream.write(json.dumps({**row, "id": f"row-{number}"}) + "\n")


def cpu_seconds() -> float:
    """Of this process and its children, theirs included (the workers are a fork server's)."""
    total = sum(os.times()[:4])
    ticks = os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            total += sum(map(int, fields[11:15])) / ticks
    return total


def with_map(base: Path, source: Path, folder: Path) -> int:
    """The baseline; rows are texts in Arrow, since it would merge the tools' arguments."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(str(base), local_files_only=True)
    rows = Dataset.from_dict({"row": source.read_text(encoding="utf-8").splitlines()})

    def encode(example: dict[str, Any]) -> dict[str, Any]:
        row = json.loads(example["row"])
        for message in row["messages"]:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        return {"input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}

    encoded = rows.map(encode, remove_columns=["row"], load_from_cache_file=False)
    encoded.save_to_disk(str(folder))
    return len(encoded)


def with_prepare(**settings: Any) -> Callable[[Path, Path, Path], int]:
    """`mtp data prepare` under some settings."""

    def run(base: Path, source: Path, folder: Path) -> int:
        return prepare(base, [source], folder, max_length=1 << 20, **settings).rows_read

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    # As where a worker's share is: else one process would use all cores for its tokenising.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    variants = {
        "datasets.map, 1 process": with_map,
        "prepare, 1 process": with_prepare(num_workers=1),
        f"prepare, {cores} processes": with_prepare(num_workers=cores),
        f"prepare, {cores} processes, no near-duplicates": with_prepare(
            num_workers=cores, near_duplicates="ignore"
        ),
    }
    results: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    loads = []
    with tempfile.TemporaryDirectory() as scratch:
        source, few = Path(scratch) / "rows.jsonl", Path(scratch) / "few.jsonl"
        write_rows(arguments.traces, few, 20)
        for number, run in enumerate((with_map, with_prepare(num_workers=1))):
            run(arguments.base, few, Path(scratch) / f"warm-{number}")  # imports are nobody's work
        write_rows(arguments.traces, source, arguments.rows)
        for number in range(arguments.rounds):
            for name, run in variants.items():
                loads.append(os.getloadavg()[0])
                started, cpu_started = time.perf_counter(), cpu_seconds()
                count = run(arguments.base, source, Path(scratch) / f"{number}-{len(name)}")
                seconds = time.perf_counter() - started
                assert count == arguments.rows
                results[name].append(round(count / seconds, 2))
                cpu[name].append(round((cpu_seconds() - cpu_started) / count * 1000, 3))
        size = source.stat().st_size
    best = {name: max(found) for name, found in results.items()}
    baseline = best["datasets.map, 1 process"]
    print(
        json.dumps(
            {
                "schema_version": 1,
                "rows": arguments.rows,
                "bytes": size,
                "rows_per_second": results,
                "ratio_of_best": {name: round(v / baseline, 3) for name, v in best.items()},
                "cpu_milliseconds_per_row": cpu,
                "cores": cores,
                "load_average_before_each": loads,
                "python": platform.python_version(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
