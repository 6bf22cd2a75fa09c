"""Time a graft against the least that it must do, and its memory.

    python benchmarks/graft/measure.py --work /tmp/graft-bench --report graft.json --rounds 3

Rows, each with its raw numbers:
- hard links: seconds of `write_graft` without its digests, the head in the page cache as after
  `mtp quantize`, against writing as many bytes from memory and syncing them, and against `cp` of
  the head and a sync; eight of each in turn.
- copies: bytes a second of the same with `--link copy`, against `cp -r` of the base and a sync.
- hashing: bytes a second on all cores, against one `sha256sum` on one core.
- memory: peak resident set of the whole `mtp graft` command, from its rusage.

Before each timed step the page cache is dropped (root), and `sync` runs: every other row starts
cold. `--only hard` leaves the long rows out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
from graft.staging import _sync_tree, sync  # noqa: E402

BLOCK = 1024 * 1024  # larger ones leave the processor's cache: 16 MiB took 1.5 times as long


def timed(action: Callable[[], Any], *, warm: bool = False, cached: Path | None = None) -> float:
    """Seconds of one action from a settled disk, with nothing cached unless it is said."""
    os.sync()
    if not warm:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    if cached:
        subprocess.run(["cat", cached], check=True, stdout=subprocess.DEVNULL)
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


def copy_and_sync(source: Path, target: Path) -> None:
    """`cp -r`, until it is on the disk."""
    subprocess.run(["cp", "-r", source, target], check=True)
    if target.is_dir():
        _sync_tree(target)
    else:
        sync(target)


def graft_seconds(work: Path, link: str, cached: Path | None = None) -> dict[str, float]:
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
        seconds["fingerprint"] = timed(lambda: base_fingerprint(Checkpoint(base)))
        start = time.perf_counter()
        plan = plan_graft(base, head, out=out)
        seconds["plan, with fingerprint and the head's values"] = time.perf_counter() - start
        total = timed(lambda: writer.write_graft(plan, out, link=link), cached=cached)
    finally:
        writer.graft_manifest = make_manifest
    seconds["write, sync, rename"] = total - seconds["digests"]
    shutil.rmtree(out)
    return seconds


def hard_links(work: Path, pairs: int = 8) -> dict[str, Any]:
    """Grafts with hard links, without digests, in turn with what the disk takes for the bytes.

    In turn and the other way round the next time, since a shared disk's speed wanders.
    """
    head = work / "head" / "mtp.safetensors"
    head_bytes = head.stat().st_size
    plan = plan_graft(work / "base", work / "head", out=work / "out")
    make_manifest = writer.graft_manifest
    writer.graft_manifest = lambda *_: {"files": {}}

    def clean() -> None:
        (work / "other").unlink(missing_ok=True)
        shutil.rmtree(work / "out", ignore_errors=True)

    actions: dict[str, Callable[[], Any]] = {
        "write_alone_s": lambda: write_bytes(work / "other", head_bytes),
        "graft_hard_s": lambda: writer.write_graft(plan, work / "out", link="hard"),
        "cp_head_s": lambda: copy_and_sync(head, work / "other"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    try:
        for number in range(pairs):
            for name in list(actions) if number % 2 else reversed(actions):
                seconds[name].append(timed(actions[name], cached=head))
                clean()
    finally:
        writer.graft_manifest = make_manifest
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "head_bytes": head_bytes, **seconds,
        "hard_over_write_alone": middle["graft_hard_s"] / middle["write_alone_s"],
        "hard_over_cp_of_the_head": middle["graft_hard_s"] / middle["cp_head_s"],
    }  # fmt: skip


def copies_and_hashes(work: Path) -> dict[str, Any]:
    """A graft with copies beside `cp -r`, and our digests beside `sha256sum`."""
    head_bytes = (work / "head" / "mtp.safetensors").stat().st_size
    base_bytes = sum(path.stat().st_size for path in (work / "base").iterdir())
    copied = graft_seconds(work, "copy")
    cp_seconds = timed(lambda: copy_and_sync(work / "base", work / "cp"))
    shutil.rmtree(work / "cp")
    shards = [path.name for path in (work / "base").glob("*.safetensors")]
    shard = max((work / "base" / name for name in shards), key=lambda p: p.stat().st_size)
    num_bytes = sum((work / "base" / name).stat().st_size for name in shards)

    def one() -> None:
        subprocess.run(["sha256sum", shard], check=True, stdout=subprocess.DEVNULL)

    theirs = min(timed(one, warm=True) for _ in range(2))
    ours = min(timed(lambda: file_digests(work / "base", shards), warm=True) for _ in range(2))
    cores = os.cpu_count() or 1
    their_rate, our_rate = shard.stat().st_size / theirs, num_bytes / ours
    return {
        "base_bytes": base_bytes, "graft_copy_s": copied, "cp_s": cp_seconds, "cores": cores,
        "sha256sum_bytes_per_s": their_rate, "our_bytes_per_s": our_rate,
        "copy_rate_over_cp": ((base_bytes + head_bytes) / copied["write, sync, rename"])
        / (base_bytes / cp_seconds),
        "hash_rate_over_sha256sum_per_core": our_rate / cores / their_rate,
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
    parser.add_argument("--only", choices=["hard"])
    options = parser.parse_args()
    shutil.rmtree(options.work / "out", ignore_errors=True)
    shutil.rmtree(options.work / "cp", ignore_errors=True)
    result: dict[str, Any] = {
        "schema_version": 1, "command": sys.argv, "platform": platform.platform(),
        "rounds": [], **({} if options.only else peak_memory(options.work)),
    }  # fmt: skip
    for _ in range(options.rounds):  # written after each, so that a broken run leaves its rounds
        one = hard_links(options.work)
        if not options.only:
            one |= copies_and_hashes(options.work)
        result["rounds"].append(one | {"load_average": os.getloadavg()})
        result["medians"] = {
            key: statistics.median(one[key] for one in result["rounds"])
            for key in result["rounds"][0]
            if "_over_" in key
        }
        options.report.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
