"""Peak memory of reading and preparing files of growing size: it must not follow the size.

Usage: python benchmarks/data_memory.py --base BASE --read-mb 64 1024 --prepare-mb 8 64 > OUT.json
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

READ = """
import resource, sys
from collections import Counter
from mtp.data.sources import Reading, read_source
rows = sum(1 for item in read_source(sys.argv[1], Counter(), Reading()))
print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
PREPARE = """
import resource, sys
from pathlib import Path
from mtp.data.prepare import prepare
# All rows are made from one mould, so near-duplicates are not looked for.
folders = Path(sys.argv[2]), [sys.argv[1]], Path(sys.argv[3])
report = prepare(*folders, near_duplicates="ignore")
print(report.rows_read, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def write_rows(path: Path, num_bytes: int, *, as_list: bool) -> None:
    """Conversations of about 8 kB, all different, as JSON Lines or as one JSON list."""
    written, number = 0, 0
    with path.open("w", encoding="utf-8") as stream:
        stream.write("[\n" if as_list else "")
        while written < num_bytes:
            turns = []
            for turn in range(8):
                text = f"Step {turn} of task {number}: " + "look at the next file. " * 22
                turns += [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": f"Reply {number}.{turn}: {text}"},
                ]
            line = json.dumps({"id": f"row-{number}", "messages": turns})
            stream.write((",\n" if as_list and number else "") + line + ("" if as_list else "\n"))
            written += len(line) + 1
            number += 1
        stream.write("\n]" if as_list else "")


def measure(script: str, path: Path, *arguments: str) -> dict[str, Any]:
    """Run a script in a process of its own; its rows, peak resident memory and CPU seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-c", script, str(path), *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows, kilobytes = output.split()[-2:]
    return {
        "file": path.name,
        "megabytes": round(path.stat().st_size / 1e6),
        "rows": int(rows),
        "peak_resident_mb": round(int(kilobytes) / 1024),
        "cpu_seconds": round(after.ru_utime - before.ru_utime, 1),
        "wall_seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True)
    parser.add_argument("--read-mb", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--prepare-mb", type=int, nargs="*", default=[8, 64])
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for step, sizes in (("read", options.read_mb), ("prepare", options.prepare_mb)):
            for megabytes in sizes:
                for name in ("rows.jsonl", "rows.json"):
                    path = Path(folder, name)
                    write_rows(path, megabytes * 1_000_000, as_list=name == "rows.json")
                    if step == "read":
                        result = measure(READ, path)
                    else:
                        result = measure(PREPARE, path, options.base, f"{folder}/{megabytes}{name}")
                    results.append({"step": step, **result})
                    path.unlink()
    machine = {"python": platform.python_version(), "machine": platform.platform()}
    print(json.dumps({"schema_version": 1, **machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
