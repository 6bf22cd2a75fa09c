"""Peak memory of reading and preparing files of growing size: it must hardly follow the size.

Memory is that of the whole process tree, looked at twice a second: the sum of resident sets (pages
that processes share count for each of them) and of proportional ones (they count once). Rows are
conversations of random words, all different, of about 8 kB or 1 kB.

Usage: python benchmarks/data_memory.py --base BASE --read-mb 1024 --prepare-mb 64 256 > OUT.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

READ = """
import sys
from collections import Counter
from mtp.data.sources import Reading, read_source
print(sum(1 for item in read_source(sys.argv[1], Counter(), Reading())))
"""
PREPARE = """
import sys
from pathlib import Path
from mtp.data.prepare import prepare
report = prepare(Path(sys.argv[2]), [sys.argv[1]], Path(sys.argv[3]))
assert report.train.rows > 0.8 * report.rows_read, report.as_text()
print(report.rows_read)
"""
_SECONDS_BETWEEN = 0.5


def write_rows(path: Path, num_bytes: int, *, num_turns: int, as_list: bool) -> None:
    """Conversations of `num_turns` times about 1 kB, as JSON Lines or as one JSON list."""
    generator = random.Random(num_bytes)
    words = ["".join(generator.choices("etaoinshrdlu", k=3 + n % 6)) for n in range(4000)]
    written, number = 0, 0
    with path.open("w", encoding="utf-8") as stream:
        stream.write("[\n" if as_list else "")
        while written < num_bytes:
            turns = []
            for _ in range(num_turns):
                asked, said = (" ".join(generator.choices(words, k=75)) for _ in range(2))
                turns += [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": said},
                ]
            line = json.dumps({"id": f"row-{number}", "messages": turns})
            stream.write((",\n" if as_list and number else "") + line + ("" if as_list else "\n"))
            written += len(line) + 1
            number += 1
        stream.write("\n]" if as_list else "")


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for process in found:
        found += parents.get(process, [])
    return found


def memory(processes: list[int]) -> tuple[int, int]:
    """Kilobytes: resident and proportional sets, summed."""
    total = [0, 0]
    for process in processes:
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        for place, name in enumerate(("Rss", "Pss")):
            match = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
            total[place] += int(match.group(1)) if match else 0
    return total[0], total[1]


def measure(script: str, path: Path, *arguments: str) -> dict[str, Any]:
    """Run a script in a process of its own; its rows and the peaks of its tree."""
    start = time.monotonic()
    command = [sys.executable, "-c", script, str(path), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    resident = proportional = most = 0
    while process.poll() is None:
        processes = tree(process.pid)
        found = memory(processes)
        resident, proportional = max(resident, found[0]), max(proportional, found[1])
        most = max(most, len(processes))
        time.sleep(_SECONDS_BETWEEN)
    assert process.stdout is not None and process.returncode == 0
    return {
        "megabytes": round(path.stat().st_size / 1e6),
        "rows": int(process.stdout.read().split()[-1]),
        "processes": most,
        "peak_resident_sum_mb": round(resident / 1024),
        "peak_proportional_sum_mb": round(proportional / 1024),
        "wall_seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    """Print each measurement as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True)
    parser.add_argument("--read-mb", type=int, nargs="*", default=[])
    parser.add_argument("--prepare-mb", type=int, nargs="*", default=[])
    parser.add_argument("--row-kb", type=int, default=8)
    options = parser.parse_args()
    machine = {"python": platform.python_version(), "machine": platform.platform()}
    print(json.dumps({"schema_version": 2, **machine, "cores": len(os.sched_getaffinity(0))}))
    with tempfile.TemporaryDirectory() as folder:
        for step, sizes in (("read", options.read_mb), ("prepare", options.prepare_mb)):
            for megabytes in sizes:
                for name in ("rows.jsonl", "rows.json") if step == "read" else ("rows.jsonl",):
                    path = Path(folder, name)
                    size, as_list = megabytes * 1_000_000, name == "rows.json"
                    write_rows(path, size, num_turns=options.row_kb, as_list=as_list)
                    more = (options.base, f"{folder}/{megabytes}") if step == "prepare" else ()
                    result = measure(READ if step == "read" else PREPARE, path, *more)
                    kind = {"step": step, "file": name, "row_kb": options.row_kb}
                    print(json.dumps({**kind, **result}), flush=True)
                    path.unlink()


if __name__ == "__main__":
    main()
