"""Speed in many short alternated rounds.

    python timing.py WORK OUT.json SECONDS

In a round each variant serves the same prompts, one after the other, and the next round goes
backwards (ABBA), so that clocks and neighbours hit them alike: every figure is a ratio within its
round. Variants in plan["rarely"] join every third round. Besides tokens per second, which depend on
where a text goes after a near-tie, seconds per engine step are compared: a round's mean and median.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import engines

RARELY = 3
MEASURES = {
    "tokens per second": lambda r: r["num_tokens"] / r["seconds"],
    "seconds per step": lambda r: r["seconds"] / r["num_steps"],
    "median step": lambda r: r["median_step"],
}
PAIRS = (
    ("routed", "edited"), ("routed", "stock"), ("routed", "plain"), ("stock", "plain"),
    ("routed-compiled", "routed"), ("routed-compiled", "stock"),
)  # fmt: skip


def student_t(degrees: int) -> float:
    """97.5 % quantile of Student's t; Cornish-Fisher, within 0.3 % from 5 degrees on.

    Source: Abramowitz and Stegun 26.7.5.
    """
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def mean_and_interval(values: list[float]) -> dict[str, Any]:
    mean = statistics.fmean(values)
    half = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half, "rounds": len(values),
            "median": statistics.median(values)}  # fmt: skip


def requests(plan: dict[str, Any], kind: dict[str, int], number: int) -> dict[str, Any]:
    """What is asked in round `number`: each round goes on where the last one ended."""
    prompts, count = plan["prompts"], kind["requests"]
    chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
    return {"prompts": chosen, "concurrency": kind["concurrency"], "max_tokens": kind["tokens"]}


def ratios(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for a, b in PAIRS:
        both = [r for r in rounds if a in r and b in r]
        if len(both) > 5:
            found[f"{a} / {b}"] = {
                name: mean_and_interval([measure(r[a]) / measure(r[b]) for r in both])
                for name, measure in MEASURES.items()
            }
    return found


def main(work: Path, out: Path, budget: float) -> None:
    plan = engines.plan_of(work)
    names = [name for name in plan["timing"] if engines.is_ready(work, name)]
    deadline = time.monotonic() + budget
    rounds: dict[str, list[dict[str, Any]]] = {str(k["concurrency"]): [] for k in plan["kinds"]}
    number = -2  # two rounds warm up and are not counted
    while time.monotonic() < deadline:
        for kind in plan["kinds"]:
            taking_part = [
                name for name in names
                if number < 0 or number % RARELY == 0 or name not in plan["rarely"]
            ]  # fmt: skip
            given = requests(plan, kind, number)
            one = {
                name: engines.ask(work, name, dict(given))
                for name in (taking_part if number % 2 else taking_part[::-1])
            }
            if number >= 0:
                rounds[str(kind["concurrency"])].append(one)
        number += 1
    report: dict[str, Any] = {
        "schema_version": 1, "hardware": plan["hardware"], "vllm_version": plan["vllm_version"],
        "kinds": plan["kinds"], "rounds": rounds,
        "ratios": {key: ratios(found) for key, found in rounds.items()},
        "means": {
            key: {
                name: {
                    label: statistics.fmean([m(r[name]) for r in found if name in r])
                    for label, m in MEASURES.items()
                }
                for name in names
            }
            for key, found in rounds.items() if found
        },
    }  # fmt: skip
    out.write_text(json.dumps(report))
    for key, table in report["means"].items():
        for name, row in table.items():
            print(key, name, f"{row['tokens per second']:.1f} tok/s",
                  f"{1e3 * row['seconds per step']:.3f} ms a step, median",
                  f"{1e3 * row['median step']:.3f}")  # fmt: skip
    for key, table in report["ratios"].items():
        for pair, row in table.items():
            cells = [f"{label} {r['mean']:.4f} [{r['low']:.4f}, {r['high']:.4f}]"
                     for label, r in row.items()]  # fmt: skip
            print(key, pair, *cells, f"n={row['median step']['rounds']}", sep="  ", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
