"""Time a graft against the least that it must do, and its memory.

    python benchmarks/graft/measure.py --work /tmp/graft-bench --report graft.json --rounds 3

Rows, each with its raw numbers:
- hard links: seconds of `write_graft` without its digests, against writing as many bytes as the
  head has from memory and syncing them. Inside the graft everything written is synced before the
  digests begin, so that no disk time hides under the hashing.
- copies: bytes a second of the same with `--link copy`, against `cp -r` of the base and a sync.
- hashing: bytes a second on all cores, against one `sha256sum` on one core.
- memory: peak resident set of the whole `mtp graft` command, from its rusage.

Before each timed step the page cache is dropped where we may (root), and `sync` runs: every row
starts cold. `--warm` leaves the cache alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from graft import writer  # noqa: E402
from graft.manifest import base_fingerprint, file_digests  # noqa: E402
from graft.plan import plan_graft  # noqa: E402
from graft.reader import Checkpoint  # noqa: E402
from graft.staging import _sync_tree  # noqa: E402

BLOCK = 16 * 1024 * 1024


def timed(action: Callable[[], Any], warm: bool) -> float:
    """Seconds of one action from a settled disk."""
    os.sync()
    drop = Path("/proc/sys/vm/drop_caches")
    if not warm and os.access(drop, os.W_OK):
        drop.write_text("3")
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_bytes(path: Path, nbytes: int) -> None:
    """Write that many random bytes (one block over and over) and sync them."""
    block, left = os.urandom(BLOCK), nbytes
    with path.open("wb", buffering=0) as file:
        while left:
            left -= file.write(block[: min(left, BLOCK)])
        os.fsync(file.fileno())


def graft_seconds(work: Path, link: str, warm: bool) -> dict[str, float]:
    """One graft, its phases apart."""
    base, head, out = work / "base", work / "head", work / "out"
    seconds: dict[str, float] = {}
    make_manifest = writer.graft_manifest

    def manifest_after_sync(plan: Any, folder: Path, *rest: Any) -> Any:
        _sync_tree(folder)
        start = time.perf_counter()
        manifest = make_manifest(plan, folder, *rest)
        seconds["digests"] = time.perf_counter() - start
        return manifest

    writer.graft_manifest = manifest_after_sync
    try:
        seconds["fingerprint"] = timed(lambda: base_fingerprint(Checkpoint(base)), warm)
        start = time.perf_counter()
        plan = plan_graft(base, head, out=out)
        seconds["plan, with fingerprint and the head's values"] = time.perf_counter() - start
        total = timed(lambda: writer.write_graft(plan, out, link=link), warm)
    finally:
        writer.graft_manifest = make_manifest
    seconds["write, sync, rename"] = total - seconds["digests"]
    shutil.rmtree(out)
    return seconds


def round_of(work: Path, warm: bool) -> dict[str, Any]:
    """Every comparison once, neighbours in time."""
    head_bytes = (work / "head" / "mtp.safetensors").stat().st_size
    base_bytes = sum(path.stat().st_size for path in (work / "base").iterdir())
    alone = timed(lambda: write_bytes(work / "alone", head_bytes), warm)
    (work / "alone").unlink()
    hard = graft_seconds(work, "hard", warm)
    copied = graft_seconds(work, "copy", warm)

    def cp() -> None:
        subprocess.run(["cp", "-r", work / "base", work / "cp"], check=True)
        _sync_tree(work / "cp")

    cp_seconds = timed(cp, warm)
    shutil.rmtree(work / "cp")
    shard = max((work / "base").glob("*.safetensors"), key=lambda p: p.stat().st_size)
    one = timed(lambda: subprocess.run(["sha256sum", shard], check=True, stdout=-3), True)
    one = min(one, timed(lambda: subprocess.run(["sha256sum", shard], check=True, stdout=-3), True))
    shards = [p.name for p in (work / "base").glob("*.safetensors")]
    ours_bytes = sum((work / "base" / n).stat().st_size for n in shards)
    ours = timed(lambda: file_digests(work / "base", shards), True)
    ours = min(ours, timed(lambda: file_digests(work / "base", shards), True))
    cores = os.cpu_count() or 1
    sha256sum_rate, our_rate = shard.stat().st_size / one, ours_bytes / ours
    return {
        "head_bytes": head_bytes, "base_bytes": base_bytes, "write_alone_s": alone,
        "graft_hard_s": hard, "graft_copy_s": copied, "cp_s": cp_seconds,
        "sha256sum_bytes_per_s": sha256sum_rate, "our_bytes_per_s": our_rate, "cores": cores,
        "hard_over_write_alone": hard["write, sync, rename"] / alone,
        "copy_rate_over_cp": ((base_bytes + head_bytes) / copied["write, sync, rename"])
        / (base_bytes / cp_seconds),
        "hash_rate_over_sha256sum_per_core": our_rate / cores / sha256sum_rate,
    }  # fmt: skip


def peak_memory(work: Path) -> dict[str, Any]:
    """Peak resident set of the command, in MB, with hard links and with copies."""
    peaks = {}
    for link in ("hard", "copy"):
        command = [sys.executable, "-m", "mtp.cli", "graft", "--base", work / "base",
                   "--head", work / "head", "--out", work / "out", "--link", link]  # fmt: skip
        child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"mtp graft failed: {status}")
        peaks[link] = usage.ru_maxrss / 1000
        shutil.rmtree(work / "out")
    return {"peak_rss_mb": peaks}


def main() -> None:
    """Measure, print the medians, write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args()
    shutil.rmtree(options.work / "out", ignore_errors=True)
    shutil.rmtree(options.work / "cp", ignore_errors=True)
    rounds = [round_of(options.work, options.warm) for _ in range(options.rounds)]
    keys = [key for key in rounds[0] if "_over_" in key]
    result = {
        "schema_version": 1, "command": sys.argv, "platform": platform.platform(),
        "load_average": os.getloadavg(), "rounds": rounds,
        "medians": {key: statistics.median(r[key] for r in rounds) for key in keys},
        **peak_memory(options.work),
        "benchmark_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }  # fmt: skip
    options.report.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("medians", "peak_rss_mb", "load_average")}, indent=1))


if __name__ == "__main__":
    main()
