"""Kill grafts at random moments and look at what is left.

    python benchmarks/graft/kills.py --work /tmp/graft-kills --report kills.json --kills 200

Each kill is a SIGKILL of a child that has everything imported and planned and only writes, so that
the moments fall into the write and not into Python's start. The child names each step as it begins
(a byte in a pipe), so that every kill is known to have hit staging, links, head, small files,
digests, the sync, the rename or the time after it. Half of the moments are uniform over the whole
write; the other half wait for a step, each in turn, and come shortly after it begins, since links
and rename are too short to be hit by chance. Four ways in turn: a new `--out`, `--overwrite` of an
existing one, and both with `--link copy`. After each: the base must be unchanged (digests), `--out`
must be absent or pass `mtp verify` (with `--overwrite`: never absent), and the next run must leave
nothing but inputs and output.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import write_base, write_tiny_head  # noqa: E402

from graft import staging, writer  # noqa: E402
from graft.manifest import file_digests  # noqa: E402
from graft.plan import GraftPlan, plan_graft  # noqa: E402
from graft.verify import verify_graft  # noqa: E402

WAYS: tuple[dict[str, Any], ...] = (
    {"way": "new"}, {"way": "overwrite", "overwrite": True},
    {"way": "copy", "link": "copy"}, {"way": "overwrite, copy", "overwrite": True, "link": "copy"},
)  # fmt: skip
STEPS = (
    (staging, "_clean_up", "lock and clean-up"), (writer, "share_files", "links"),
    (writer, "write_shard", "head"), (writer, "_reopen", "reopen and index"),
    (writer, "graft_manifest", "digests"), (staging, "_sync_tree", "sync"),
    (staging, "_put_in_place", "rename"),
)  # fmt: skip
BEGIN, DONE, AFTER_RENAME = 255, 254, 253
OTHER_STEPS = {BEGIN: "before the lock", DONE: "done", AFTER_RENAME: "after the rename"}


def announce(pipe: int) -> None:
    """Let each step of this process say that it begins."""
    for number, (module, name, _) in enumerate(STEPS):

        def wrapped(*args: Any, _inner: Any = getattr(module, name), _n: int = number, **kw: Any):
            os.write(pipe, bytes([_n]))
            result = _inner(*args, **kw)
            if _n == len(STEPS) - 1:
                os.write(pipe, bytes([AFTER_RENAME]))
            return result

        setattr(module, name, wrapped)


def killed_graft(
    plan: GraftPlan, out: Path, wait_for: int, delay: float, options: dict[str, Any]
) -> str:
    """Write in a child, kill it `delay` seconds after it says `wait_for`; the step it was in."""
    reader, pipe = os.pipe()
    child = os.fork()
    if not child:
        try:
            announce(pipe)
            os.write(pipe, bytes([BEGIN]))
            writer.write_graft(plan, out, **{k: v for k, v in options.items() if k != "way"})
            os.write(pipe, bytes([DONE]))
        finally:
            os._exit(0)
    os.close(pipe)
    seen = b""
    while wait_for not in seen and (chunk := os.read(reader, 1)):
        seen += chunk
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while chunk := os.read(reader, 4096):
        seen += chunk
    os.close(reader)
    return OTHER_STEPS[seen[-1]] if seen[-1] in OTHER_STEPS else STEPS[seen[-1]][2]


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file."""
    return file_digests(folder, sorted(path.name for path in folder.iterdir()))


def build(work: Path) -> tuple[Path, Path]:
    """A base of some MB with a mixed shard, and a head for it."""
    base = write_base(work / "base", declared=1, head_layers=1, head_place="mixed")
    import torch
    from safetensors.torch import save_file

    ballast = {f"model.language_model.ballast.{i}": torch.rand(1024, 1024) for i in range(8)}
    save_file(ballast, base / "ballast.safetensors", metadata={"format": "pt"})
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(ballast, "ballast.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    return base, write_tiny_head(work / "head", base, form="nvfp4-modelopt")


def one_kill(
    number: int, moments: random.Random, durations: dict[str, float], base: Path, head: Path
) -> dict[str, Any]:
    """Prepare, kill, inspect; what happened in one row."""
    work, options = base.parent, WAYS[number % len(WAYS)]
    out, plan = work / "out", plan_graft(base, head)
    if options.get("overwrite"):
        if not out.exists():
            writer.write_graft(plan, out)
    else:
        shutil.rmtree(out, ignore_errors=True)
    before = contents(out) if out.exists() else None
    if number % 8 < 4:
        wait_for, delay = BEGIN, moments.uniform(0, durations[options["way"]])
    else:
        steps = [*range(len(STEPS)), AFTER_RENAME]
        wait_for, delay = steps[number // 8 % len(steps)], 10 ** moments.uniform(-5, -2)
    step = killed_graft(plan, out, wait_for, delay, options)
    left_over = sorted(p.name for p in work.iterdir() if p.name not in ("base", "head", "out"))
    report = verify_graft(out, base) if out.exists() else None
    return {
        "number": number, "way": options["way"], "delay_s": round(delay, 6),
        "uniform": wait_for == BEGIN, "step": step,
        "out": "absent" if report is None else "whole" if report.ok else "HALF",
        "failures": report.failures if report else [],
        "old_output_lost": before is not None and report is None,
        "left_over": left_over,
    }  # fmt: skip


def main() -> None:
    """Kill, count, write every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    shutil.rmtree(settings.work, ignore_errors=True)
    settings.work.mkdir(parents=True)
    base, head = build(settings.work)
    pristine, plan = contents(base), plan_graft(base, head)
    durations = {}
    for options in WAYS:
        arguments = {k: v for k, v in options.items() if k != "way"}
        if not options.get("overwrite"):
            shutil.rmtree(settings.work / "out", ignore_errors=True)
        start = time.perf_counter()
        writer.write_graft(plan, settings.work / "out", **arguments)
        durations[options["way"]] = time.perf_counter() - start
    moments, rows, damaged, dirty = random.Random(settings.seed), [], 0, 0
    for number in range(settings.kills):
        row = one_kill(number, moments, durations, base, head)
        row["base_damaged"] = contents(base) != pristine
        writer.write_graft(plan, settings.work / "out", overwrite=True)
        after = sorted(path.name for path in settings.work.iterdir())
        row["after_the_next_run"] = after
        damaged += row["base_damaged"]
        dirty += after != ["base", "head", "out"]
        rows.append(row)
    summary = {
        "kills": len(rows), "half_written": sum(row["out"] == "HALF" for row in rows),
        "old_outputs_lost": sum(row["old_output_lost"] for row in rows),
        "damaged_bases": damaged, "not_cleaned_up": dirty,
        "steps": dict(collections.Counter(row["step"] for row in rows)),
        "ways": dict(collections.Counter(row["way"] for row in rows)),
        "outcomes": dict(collections.Counter(row["out"] for row in rows)),
        "left_staging": sum(any("staging" in n for n in row["left_over"]) for row in rows),
    }  # fmt: skip
    result = {"schema_version": 1, "command": sys.argv, "summary": summary,
              "durations_s": durations, "rows": rows}  # fmt: skip
    settings.report.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    sys.exit(bool(summary["half_written"] or damaged or dirty or summary["old_outputs_lost"]))


if __name__ == "__main__":
    main()
