"""Serve each grafted head with vLLM, several engines at a time, as heads become ready.

    python serve_all.py WORK [NAME...] [--jobs 6] [--seconds 900] [--cpu]
    python serve_all.py WORK NAME... --served pairs --prompts 1600 --greedy

Reads heads.toml, waits for WORK/grafted/NAME@BASE of train_all.py, and leaves
SERVED/ENGINE/result.json (serve_head.py), SERVED being WORK/served. Prompts come from the held-out
rows of WORK/DATA. One engine with probabilistic drafts measures greedy decoding, where its drafts
are the most likely tokens too, and temperature 0.6; one with greedy drafts measures the same, for
those heads of which heads.toml asks it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "routing_h200"))

from variants import K, engine_options

HERE = Path(__file__).parent
NUM_PROMPTS, MAX_PROMPT_TOKENS = 400, 768
TEMPERATURES = (0.0, 0.6)


def write_plan(work: Path, data: Path, served: Path, num_prompts: int) -> Path:
    from mtp.data.prompts import evaluation_prompts
    from mtp.serving.probe import end_tokens

    prompts = evaluation_prompts(data, num_prompts=num_prompts, max_prompt_tokens=MAX_PROMPT_TOKENS)
    plan = {
        "prompts": [list(prompt.token_ids) for prompt in prompts],
        "conversations": [prompt.id.rpartition("@")[0] for prompt in prompts],
        "categories": [prompt.category for prompt in prompts],
        "end_tokens": end_tokens(work / "base"),
    }
    path = served / "plan.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(plan))
    return path


def specs_of(
    work: Path, names: list[str], plan: Path, temperatures: tuple[float, ...], cpu: bool
) -> list[dict[str, Any]]:
    """One for each engine, the most wanted first: every head once, then the other drafts."""
    common, _, eager = engine_options("trained", cpu)
    table = tomllib.loads((HERE / "heads.toml").read_text())["heads"]
    specs = []
    for name in names or list(table):
        bases, runtimes = table[name].get("bases", ["base"]), table[name]["serve"]
        drawn = list(enumerate(table[name].get("drafts", ["probabilistic"])))
        if temperatures == (0.0,):  # then all draws are the same
            drawn = [(0, "probabilistic")]
        for base, runtime, (turn, drafts) in itertools.product(bases, runtimes, drawn):
            if base == "base" or drafts == "probabilistic":
                specs.append({
                    "name": f"{name}-{base}-{runtime}-{drafts}", "head": name, "base": base,
                    "runtime": runtime, "turn": turn, "plan": str(plan),
                    "checkpoint": str(work / "grafted" / f"{name}@{base}"),
                    "num_speculative_tokens": K, "draft_sample_method": drafts,
                    "engine": common | eager,
                    "environment": {"MTP_GRAFT_ROUTING": "on" if runtime == "routed" else "off"},
                    "runs": [{"temperature": t, "seed": 0} for t in temperatures],
                })  # fmt: skip
    return sorted(specs, key=lambda spec: spec["turn"])


def start(served: Path, spec: dict[str, Any]) -> tuple[subprocess.Popen[bytes], float]:
    folder = served / spec["name"]
    folder.mkdir(exist_ok=True)
    (folder / "spec.json").write_text(json.dumps(spec))
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_head.py"), str(folder)], stdout=log, stderr=log,
            env={**os.environ, **spec["environment"]}, cwd=folder, start_new_session=True,
        )  # fmt: skip
    return process, time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--served", default="served")
    parser.add_argument("--data", default="data", help="whose held-out rows are asked")
    parser.add_argument("--greedy", action="store_true", help="temperature 0 alone")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    work, deadline = given.work.resolve(), time.monotonic() + given.seconds
    served = work / given.served
    plan = write_plan(work, work / given.data, served, given.prompts)
    temperatures = (0.0,) if given.greedy else TEMPERATURES
    waiting = specs_of(work, given.names, plan, temperatures, given.cpu)
    waiting = [s for s in waiting if not (served / s["name"] / "result.json").exists()]
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    while (waiting or running) and time.monotonic() < deadline:
        for name, (process, started) in list(running.items()):
            if process.poll() is not None:
                seconds = time.monotonic() - started
                print(f"{time.strftime('%T')} {name}: exit {process.returncode}, {seconds:.0f} s",
                      flush=True)  # fmt: skip
                del running[name]
        for spec in list(waiting):
            if (work / "logs" / f"{spec['head']}.failed").exists():
                waiting.remove(spec)
            elif len(running) < given.jobs and Path(spec["checkpoint"]).exists():
                waiting.remove(spec)
                running[spec["name"]] = start(served, spec)
        time.sleep(1)
    for name, (process, _) in running.items():
        print(f"{name}: ended at the deadline", flush=True)
        os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
    for process, _ in running.values():
        process.wait()
    if waiting:
        print("not served:", *(spec["name"] for spec in waiting), flush=True)


if __name__ == "__main__":
    main()
