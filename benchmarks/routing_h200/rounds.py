"""Stock against routed on a GPU: acceptance, and speed in alternated rounds.

    python rounds.py start WORK SECONDS             # one engine a variant; wait until ready
    python rounds.py measure WORK OUT.json SECONDS  # as many rounds as fit
    python rounds.py stop WORK

WORK/variants.json: {"prompts": [[ids]], "variants": {name: {"checkpoint", "num_speculative_tokens",
"engine", "environment"}}}; `variants.py` beside this file writes it. In every round each variant
serves the same prompts, one after the other, so that clocks and neighbours hit them alike; every
speed is given as a ratio within its round.
"""

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from mtp.acceptance import AcceptanceCounts

WORKER = Path(__file__).with_name("worker.py")
MAX_TOKENS = 200
PROMPTS = {1: 2, 16: 32, 64: 128}  # concurrency -> requests a round
# 97.5 % quantile of Student's t at 1, 2, ... degrees of freedom; the last serves beyond.
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)


def start(work: Path, timeout: float) -> None:
    plan = json.loads((work / "variants.json").read_text())
    for name, spec in plan["variants"].items():
        folder = work / name
        folder.mkdir(exist_ok=True)
        (folder / "spec.json").write_text(json.dumps(spec))
        log = (folder / "log.txt").open("w")
        environment = {**os.environ, **spec["environment"]}
        if first := environment.pop("PYTHONPATH_FIRST", None):
            environment["PYTHONPATH"] = f"{first}:{environment.get('PYTHONPATH', '')}"
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)], stdout=log, stderr=log,
            env=environment, start_new_session=True, cwd=folder,
        )  # fmt: skip
        (folder / "pid").write_text(str(process.pid))
        time.sleep(2)
    deadline = time.monotonic() + timeout
    waiting = list(plan["variants"])
    while waiting and time.monotonic() < deadline:
        for name in list(waiting):
            if (work / name / "failed.txt").exists():
                print(name, "FAILED", (work / name / "failed.txt").read_text()[-1500:])
                waiting.remove(name)
            elif (work / name / "ready.json").exists():
                print(name, (work / name / "ready.json").read_text(), flush=True)
                waiting.remove(name)
        time.sleep(0.5)
    if waiting:
        print("not ready yet:", waiting)


class Engines:
    """The ready workers, by name."""

    def __init__(self, work: Path, names: list[str]) -> None:
        self.work, self.sent = work, {}
        self.names = [name for name in names if (work / name / "ready.json").exists()]

    def ask(self, name: str, request: dict, timeout: float = 200) -> dict:
        number = self.sent.get(name, 0)
        while (self.work / name / f"result-{number}.json").exists():
            number += 1
        self.sent[name] = number + 1
        part = self.work / name / "request.part"
        part.write_text(json.dumps(request))
        part.rename(self.work / name / f"request-{number}.json")
        result, deadline = self.work / name / f"result-{number}.json", time.monotonic() + timeout
        while not result.exists():
            if time.monotonic() > deadline or (self.work / name / "failed.txt").exists():
                raise RuntimeError(f"{name}: no answer")
            time.sleep(0.005)
        return json.loads(result.read_text())


def measure(work: Path, out: Path, budget: float) -> None:
    plan = json.loads((work / "variants.json").read_text())
    engines = Engines(work, list(plan["variants"]))
    deadline = time.monotonic() + budget
    report: dict = {"schema_version": 1, "variants": engines.names}
    report |= {key: plan[key] for key in ("hardware", "vllm_version", "predicted")}
    report["seconds_to_start"] = {
        name: json.loads((work / name / "ready.json").read_text())["seconds_to_start"]
        for name in engines.names
    }
    report["acceptance"] = acceptance(engines, plan)
    out.write_text(json.dumps(report, indent=1))
    # Eager engines, ten times slower, are there for their acceptance.
    timed = [name for name in engines.names if not name.endswith("-eager")]
    speeds: dict = {c: {name: [] for name in timed} for c in PROMPTS}
    started, longest, number = time.monotonic(), 0.0, -1  # round -1 warms up and is not counted
    while time.monotonic() + longest < deadline:
        for concurrency, count in PROMPTS.items():
            for name in timed if number % 2 else timed[::-1]:
                result = engines.ask(name, request(plan, number, count, concurrency))
                if number >= 0:
                    speeds[concurrency][name].append(result["num_tokens"] / result["seconds"])
        longest, started = max(longest, time.monotonic() - started), time.monotonic()
        number += 1
        report["speed"] = {
            concurrency: {"tokens_per_second": found, "ratios": ratios(found)}
            for concurrency, found in speeds.items()
        }
        out.write_text(json.dumps(report, indent=1))
    print(f"{number} rounds; the longest took {longest:.1f} s")
    for concurrency, found in speeds.items():
        for name in found if number > 0 else []:
            print(concurrency, name, f"{statistics.mean(found[name]):.1f} tok/s", flush=True)


def acceptance(engines: Engines, plan: dict) -> dict:
    """Each variant's own counters on all prompts, and how many requests equal plain's."""
    found, outputs = {}, {}
    everything = request(plan, 0, len(plan["prompts"]), 16) | {"ignore_eos": False}
    for name in list(engines.names):
        try:
            result = engines.ask(name, everything)
        except RuntimeError as error:
            print(error)
            engines.names.remove(name)
            continue
        outputs[name] = result.pop("outputs")
        if result["num_drafts"]:
            accepted = result["accepted_per_position"]
            result |= AcceptanceCounts(len(accepted), result["num_drafts"], accepted).as_dict()
            print(name, f"{result['mean_accepted']:.3f}", result["cumulative"], flush=True)
        found[name] = result
    if "plain" in outputs:  # the same engine again: how much of a difference is noise
        outputs["plain again"] = engines.ask("plain", everything)["outputs"]
        for name in [name for name in outputs if name != "plain"]:
            same = sum(a == b for a, b in zip(outputs[name], outputs["plain"], strict=True))
            found.setdefault(name, {})["requests_equal_to_plain"] = same
            print(name, same, "requests equal to plain's")
    return found


def request(plan: dict, number: int, count: int, concurrency: int) -> dict:
    """What an engine is asked in round `number`: each round goes on where the last one ended."""
    prompts = plan["prompts"]
    chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
    return {"prompts": chosen, "concurrency": concurrency, "max_tokens": MAX_TOKENS,
            "ignore_eos": True, "end_tokens": plan["end_tokens"]}  # fmt: skip


def ratios(speeds: dict[str, list[float]]) -> dict[str, dict]:
    """Mean of the per-round ratios of every two variants, with its 95 % interval."""
    found = {}
    for a, b in itertools.permutations(speeds, 2):
        per_round = [x / y for x, y in zip(speeds[a], speeds[b], strict=True)]
        if len(per_round) < 2:
            continue
        mean, error = (
            statistics.mean(per_round),
            statistics.stdev(per_round) / len(per_round) ** 0.5,
        )
        half = STUDENT_T[min(len(per_round) - 1, len(STUDENT_T)) - 1] * error
        found[f"{a} / {b}"] = {
            "mean": mean, "low": mean - half, "high": mean + half, "rounds": len(per_round),
        }  # fmt: skip
    return found


def stop(work: Path) -> None:
    for path in work.glob("*/pid"):
        # Workers lead a process group each, which holds their engine's process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(Path(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1] == "stop":
        stop(Path(sys.argv[2]))
    else:
        measure(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
