"""Train and graft the heads of heads.toml, several at a time on one GPU.

    python train_all.py WORK [NAME...] [--jobs 5] [--device cpu] [--set TABLE.KEY=VALUE]

WORK holds `base` and `data`, and `data-own` for the heads that learn from it. Leaves heads/NAME,
grafted/NAME@BASE, logs/NAME.txt (commands and output) and logs/times.jsonl. What is there is kept,
and a head that fails does not stop the others: its logs/NAME.failed tells `serve_all.py` not to
wait. The base's states are computed once for all, into a cache for `mtp train` and into
speculators' format; without the cache each head runs the base.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SPECULATORS = str(HERE / "train_speculators.py")
TABLE = tomllib.loads((HERE / "heads.toml").read_text())


class Jobs:
    """Commands of one WORK, each with a log and its time."""

    def __init__(self, work: Path, device: str) -> None:
        self.work, self.device = work, device
        self.logs = work / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, made: Path, *command: str) -> None:
        """Run a command unless what it makes is there.

        Raises:
            subprocess.CalledProcessError: it failed; its output is in the log.
        """
        if made.exists():
            return
        started = time.monotonic()
        with (self.logs / f"{name}.txt").open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            environment = {"OMP_NUM_THREADS": "2", **os.environ}
            if command[0] == SPECULATORS:  # its loop over experts would break a compiled graph
                environment["TORCHDYNAMO_DISABLE"] = "1"
            subprocess.run(
                [sys.executable, *command], check=True, stdout=log, stderr=log, env=environment
            )
        seconds = round(time.monotonic() - started, 1)
        with (self.logs / "times.jsonl").open("a") as times:
            times.write(
                json.dumps(
                    {"name": name, "made": str(made.relative_to(self.work)), "seconds": seconds}
                )
                + "\n"
            )
        print(f"{time.strftime('%T')} {made.relative_to(self.work)} in {seconds} s", flush=True)

    def mtp(self, name: str, made: Path, *words: str) -> None:
        self.run(name, made, "-m", "mtp.cli", *words, "--out", str(made))

    def states(self, data: str, kinds: list[str]) -> None:
        """The base's hidden states in speculators' format."""
        folder = self.work / speculators_folder(data)
        self.run(
            f"{folder.name}-states", folder / "start", SPECULATORS, "states",
            str(self.work / "base"), str(self.work / data), str(folder), "--kinds", *kinds,
            "--device", self.device,
        )  # fmt: skip

    def twin(self) -> None:
        """The base with its experts in NVFP4."""
        self.mtp(
            "base-nvfp4", self.work / "base-nvfp4", "quantize", "--trunk",
            "--base", str(self.work / "base"),
        )  # fmt: skip

    def cache(self, base: str, data: str) -> None:
        """A base's hidden states for `mtp train`."""
        name = cache_folder(base, data)
        self.mtp(
            name, self.work / name, "data", "cache",
            "--base", str(self.work / base), "--data", str(self.work / data),
            "--max-gigabytes", "16", "--device", self.device,
        )  # fmt: skip


def speculators_folder(data: str) -> str:
    return "speculators" + data.removeprefix("data")


def cache_folder(base: str, data: str) -> str:
    return f"cache-{base}" + data.removeprefix("data")


def num_tokens(data: Path, settings: list[str]) -> int:
    """Tokens that `mtp train` will see, padding not counted."""
    from mtp.data.store import load_prepared
    from mtp.recipe import load_recipe
    from mtp.schedule import StepBatches

    recipe = load_recipe(HERE / TABLE["recipe"], settings)
    batches = StepBatches(load_prepared(data)["train"], recipe.train)
    return sum(batches.num_tokens(step) for step in range(recipe.train.steps))


def small_recipe(work: Path, settings: list[str]) -> Path:
    """The recipe with `settings`, for a command without --set: a small gate, as evaluation is."""
    from mtp.recipe import load_recipe
    from mtp.recipe_text import dump_recipe

    path = work / "small-recipe.toml"
    path.write_text(dump_recipe(load_recipe(HERE / TABLE["recipe"], settings)))
    return path


def train_head(
    jobs: Jobs, name: str, head: dict[str, Any], settings: list[str], states: Future[None],
    twin: Future[None],
) -> None:  # fmt: skip
    """One head, from its base's states to checkpoints to serve."""
    work = jobs.work
    base, made = head.get("base", "base"), work / "heads" / name
    data = head.get("data", "data")
    failed = states.exception()  # waits
    if not head.get("trained", True):
        states.result()
        start = work / "grafted" / f"{name}@{base}"
        if not start.exists():
            start.symlink_to(work / "speculators" / "start")
        return
    if "quantized" in head:
        trained = work / "heads" / head["quantized"]
        while not trained.exists():
            if (jobs.logs / f"{trained.name}.failed").exists():
                raise RuntimeError(f"no {trained.name} to quantize")
            time.sleep(1)
        words = ["quantize", "--head", str(trained), "--base", str(work / base)]
        words += ["--data", str(work / data), "--recipe", str(small_recipe(work, settings))]
        words += ["--device", jobs.device, "--report", str(jobs.logs / f"{name}.json")]
        jobs.mtp(name, made, *words)
    elif "speculators" in head:
        states.result()
        run = work / "runs" / name
        words = ["--tokens", str(num_tokens(work / data, settings)), "--device", jobs.device]
        if jobs.device == "cpu":
            words += ["--tokens-per-step", "512"]
        if rate := head.get("learning_rate"):
            words += ["--lr", rate]
        rows = str(work / speculators_folder(data) / head["speculators"])
        jobs.run(name, run / "checkpoint_best", SPECULATORS, "train", rows, str(run), *words)
        jobs.run(name, made, SPECULATORS, "export", str(work / base), str(run), str(made))
    else:
        chosen = settings + head["set"]
        if not failed:
            chosen += ["teacher.kind=cache", f"teacher.cache={work / cache_folder(base, data)}"]
        words = ["train", str(HERE / TABLE["recipe"])]
        words += ["--base", str(work / base), "--data", str(work / data)]
        words += [word for setting in chosen for word in ("--set", setting)]
        jobs.mtp(name, made, *words, "--device", jobs.device, "--overwrite")
    for other in head.get("bases", ["base"]):
        if other == "base-nvfp4" and twin.exception():
            continue
        words = ["graft", "--base", str(work / other), "--head", str(made)]
        words += ["--allow-mismatch"] if other != base else []
        jobs.mtp(name, work / "grafted" / f"{name}@{other}", *words)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*", default=list(TABLE["heads"]))
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    given = parser.parse_args()
    jobs = Jobs(given.work.resolve(), given.device)
    settings = TABLE["settings"] + given.settings
    heads = {name: TABLE["heads"][name] for name in given.names}
    for folder in ("heads", "runs", "grafted"):
        (jobs.work / folder).mkdir(exist_ok=True)

    def one(name: str, states: Future[None]) -> None:
        try:
            train_head(jobs, name, heads[name], settings, states, twin)
        except Exception as error:  # the others go on
            (jobs.logs / f"{name}.failed").write_text(repr(error))
            print(f"{name} FAILED: {error!r}; see {jobs.logs / name}.txt", flush=True)

    states: dict[tuple[str, str], Future[None]] = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        twin = pool.submit(jobs.twin)
        for name, head in heads.items():
            theirs = "speculators" in head or not head.get("trained", True)
            base, data = head.get("base", "base"), head.get("data", "data")
            kind = ("speculators" if theirs else base, data)
            if kind not in states:
                if base == "base-nvfp4":
                    twin.exception()  # waits; without it the cache fails, and says so
                kinds = sorted({h["speculators"] for h in heads.values() if "speculators" in h})
                make = (
                    partial(jobs.states, data, kinds) if theirs else partial(jobs.cache, base, data)
                )
                states[kind] = pool.submit(make)
            pool.submit(one, name, states[kind])


if __name__ == "__main__":
    main()
