"""Speed in many short alternated rounds.

    python timing.py WORK OUT.json SECONDS [CONCURRENCY...]   # after WARM_UP seconds
    python timing.py pool OUT.json...   # the rounds of several such files together

In a round each variant serves the same prompts, one after the other, and the next round goes
backwards (ABBA), so that clocks and neighbours hit them alike: every figure is a ratio within its
round. Variants in plan["rarely"] join every third round. Besides tokens per second, which depend on
where a text goes after a near-tie, seconds per engine step are compared: a round's mean and median.

All engines share the same cores. A name with "-again" is a second process of the same variant: what
two such processes differ by is not the code's, and a variant's own figure is the mean of both.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines

RARELY = 3
AGAIN = "-again"
Measure = Callable[[dict[str, Any]], float]
MEASURES: dict[str, Measure] = {
    "tokens per second": lambda r: r["num_tokens"] / r["seconds"],
    "seconds per step": lambda r: r["seconds"] / r["num_steps"],
    "median step": lambda r: r["median_step"],
}
PAIRS = (
    ("routed", "edited"), ("routed", "stock"), ("routed", "plain"), ("stock", "plain"),
    ("routed-compiled", "routed"), ("routed-compiled", "stock"),
    ("routed-again", "routed"), ("edited-again", "edited"),
    *((draft, other) for draft in ("dspark", "dspark-auto", "dspark-eager")
      for other in ("plain", "stock", "routed")),
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


def figure(one: dict[str, Any], name: str, measure: Measure, other: str) -> float:
    """One round's figure of a variant: the mean over its processes, unless they are compared."""
    names = [name] if AGAIN in name + other else [name, name + AGAIN]
    return statistics.fmean(measure(one[n]) for n in names if n in one)


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
                name: mean_and_interval(
                    [figure(r, a, measure, b) / figure(r, b, measure, a) for r in both]
                )
                for name, measure in MEASURES.items()
            }
    return found


def main(work: Path, out: Path, budget: float, concurrencies: list[int]) -> None:
    plan = engines.plan_of(work)
    names = [name for name in plan["timing"] if engines.is_ready(work, name)]
    cores = sorted(os.sched_getaffinity(0))
    engines.pin(work, names, cores[: len(cores) // 2] if len(cores) >= 8 else cores)
    warm = time.monotonic() + float(os.environ.get("WARM_UP", "0"))
    kinds = [k for k in plan["kinds"] if k["concurrency"] in concurrencies or not concurrencies]
    rounds: dict[str, list[dict[str, Any]]] = {str(k["concurrency"]): [] for k in kinds}
    deadline = None
    for number in itertools.count():
        now = time.monotonic()
        if deadline is None and number >= 2 and now > warm:
            deadline = now + budget
        if deadline is not None and now > deadline:
            break
        for kind in kinds:
            taking_part = [
                name for name in names
                if deadline is None or number % RARELY == 0 or name not in plan["rarely"]
            ]  # fmt: skip
            given = requests(plan, kind, number)
            one = {
                name: engines.ask(work, name, dict(given))
                for name in (taking_part if number % 2 else taking_part[::-1])
            }
            if deadline is not None:
                rounds[str(kind["concurrency"])].append(one)
    report: dict[str, Any] = {
        "schema_version": 1, "hardware": plan["hardware"], "vllm_version": plan["vllm_version"],
        "kinds": kinds, "rounds": rounds,
        "ratios": {key: ratios(found) for key, found in rounds.items()},
    }  # fmt: skip
    out.write_text(json.dumps(report))
    show(rounds)


def show(rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Print each variant's means and what a slow neighbour spares, then the ratios."""
    for key, found in rounds.items():
        for name in dict.fromkeys(name for one in found for name in one):
            mine = [one[name] for one in found if name in one]
            speed, step, _ = (statistics.fmean(map(m, mine)) for m in MEASURES.values())
            medians = sorted(1e3 * r["median_step"] for r in mine)
            print(key, name, f"{speed:.1f} tok/s, {1e3 * step:.3f} ms a step; median step of the",
                  f"rounds: 10 % below {medians[len(medians) // 10]:.3f} ms,",
                  f"50 % below {medians[len(medians) // 2]:.3f} ms, n={len(mine)}")  # fmt: skip
    for key, found in rounds.items():
        for pair, row in ratios(found).items():
            cells = [f"{label} {r['mean']:.4f} [{r['low']:.4f}, {r['high']:.4f}]"
                     for label, r in row.items()]  # fmt: skip
            print(key, pair, *cells, f"n={row['median step']['rounds']}", sep="  ", flush=True)


def pool(files: list[Path]) -> None:
    reports = [json.loads(file.read_text()) for file in files]
    keys = reports[0]["rounds"]
    show({key: [one for report in reports for one in report["rounds"][key]] for key in keys})


if __name__ == "__main__":
    if sys.argv[1] == "pool":
        pool([Path(name) for name in sys.argv[2:]])
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), [*map(int, sys.argv[4:])])
