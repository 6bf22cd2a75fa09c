"""Stock against routed on a GPU: acceptance, and speed in alternated rounds.

    python rounds.py start WORK    # start one engine a variant, wait until all are ready
    python rounds.py measure WORK OUT.json

WORK/variants.json: {"prompts": [[ids]], "variants": {name: {"checkpoint", "num_speculative_tokens",
"engine", "environment"}}}. `run.sh` beside this file writes it, on the machine where the head was
trained. Rounds of all variants alternate, so that clocks and neighbours hit them alike; every
speed is given as a ratio within its round.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from mtp.acceptance import AcceptanceCounts

WORKER = Path(__file__).with_name("worker.py")
MAX_TOKENS = 200
ROUNDS = {1: 6, 16: 12, 64: 12}  # concurrency -> rounds
PROMPTS = {1: 4, 16: 64, 64: 128}  # concurrency -> requests a round


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
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)], stdout=log, stderr=log,
            env=environment, start_new_session=True, cwd=folder,
        )  # fmt: skip
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
    end, prompts = plan["end_tokens"], plan["prompts"]
    deadline = time.monotonic() + budget
    report: dict = {"schema_version": 1, "acceptance": {}, "speed": {}, "variants": engines.names}
    report |= {key: plan[key] for key in ("hardware", "vllm_version", "predicted")}

    def request(count: int, concurrency: int, ignore_eos: bool) -> dict:
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        return {"prompts": chosen, "concurrency": concurrency, "max_tokens": MAX_TOKENS,
                "ignore_eos": ignore_eos, "end_tokens": end}  # fmt: skip

    outputs = {}
    for name in list(engines.names):
        try:
            result = engines.ask(name, request(len(prompts), 16, False))
        except RuntimeError as error:
            print(error)
            engines.names.remove(name)
            continue
        outputs[name] = result.pop("outputs")
        if result["num_drafts"]:
            counts = AcceptanceCounts(
                len(result["accepted_per_position"]),
                result["num_drafts"],
                result["accepted_per_position"],
            )
            result |= counts.as_dict()
            print(name, f"{result['mean_accepted']:.3f}", result["cumulative"], flush=True)
        report["acceptance"][name] = result
    plain = outputs.get("plain", [])
    for name, found in outputs.items():
        same = sum(a == b for a, b in zip(found, plain, strict=False))
        report["acceptance"][name]["requests_equal_to_plain"] = same
    for concurrency, rounds in ROUNDS.items():
        speeds: dict[str, list[float]] = {name: [] for name in engines.names}
        for number in range(-1, rounds):  # round -1 warms up and is not counted
            if time.monotonic() > deadline:
                break
            order = engines.names if number % 2 else engines.names[::-1]
            for name in order:
                count = concurrency if number < 0 else PROMPTS[concurrency]
                result = engines.ask(name, request(count, concurrency, True))
                if number >= 0:
                    speeds[name].append(result["num_tokens"] / result["seconds"])
        report["speed"][concurrency] = {
            "tokens_per_second": speeds,
            "ratios": {
                f"{a} / {b}": ratio(speeds[a], speeds[b])
                for a in speeds
                for b in ("plain", "stock", "edited", "stock-eager", "nvfp4-stock", "routed-eager")
                if a != b and b in speeds and speeds[b]
            },
        }
        for name in speeds:
            if speeds[name]:
                print(concurrency, name, f"{statistics.mean(speeds[name]):.1f} tok/s", flush=True)
        out.write_text(json.dumps(report, indent=1))


def ratio(left: list[float], right: list[float]) -> dict:
    """Mean of the per-round ratios, with its 95 % interval (normal approximation)."""
    ratios = [a / b for a, b in zip(left, right, strict=True)]
    mean = statistics.mean(ratios)
    half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    return {"mean": mean, "low": mean - half, "high": mean + half, "rounds": len(ratios)}


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        measure(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
