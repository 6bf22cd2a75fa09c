"""Acceptance of every variant on the same prompts, with intervals.

    python acceptance.py WORK OUT.json PASSES CONCURRENCY

All engines are asked at once: nothing is timed here. Each pass has the prompts in another order, so
that batches, and with them near-ties of bf16, differ. Intervals are bootstraps over prompts: of a
prompt's passes their sum, and for a ratio of two variants the same prompts of both.
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engines
import numpy as np

NUM_RESAMPLES = 4000
MAX_TOKENS = 200
PAIRS = (
    ("routed", "stock"), ("routed", "routed-eager"), ("stock", "stock-eager"),
    ("routed", "edited"), ("routed", "nvfp4-routed"), ("nvfp4-routed", "nvfp4-stock"),
    ("routed-eager", "stock-eager"), ("routed", "routed-compiled"),
)  # fmt: skip


def one_pass(
    work: Path, name: str, plan: dict[str, Any], number: int, concurrency: int
) -> dict[str, Any]:
    """One variant's answer, in the order of the plan's prompts."""
    order = list(range(len(plan["prompts"])))
    random.Random(number).shuffle(order)
    result = engines.ask(
        work, name,
        {"prompts": [plan["prompts"][i] for i in order], "concurrency": concurrency,
         "max_tokens": MAX_TOKENS, "end_tokens": plan["end_tokens"], "detailed": True},
        timeout=400,
    )  # fmt: skip
    place = {prompt: i for i, prompt in enumerate(order)}
    for key in ("outputs", "increments"):
        result[key] = [result[key][place[i]] for i in range(len(order))]
    return result


def counts(passes: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Drafts and accepted tokens of each prompt, all passes together.

    The first increment is the prompt's own token. A last step cut off at the end of a request
    counts what was kept of it; vLLM's counters keep all of it.
    """
    drafts = np.zeros(len(passes[0]["increments"]))
    accepted = np.zeros_like(drafts)
    for one in passes:
        drafts += [len(steps) - 1 for steps in one["increments"]]
        accepted += [sum(steps[1:]) - len(steps[1:]) for steps in one["increments"]]
    return drafts, accepted


def interval(samples: np.ndarray) -> list[float]:
    return [float(q) for q in np.quantile(samples, (0.025, 0.975))]


def summarize(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Mean accepted of each variant and ratios of PAIRS, each with its 95 % interval."""
    generator = np.random.default_rng(0)
    tables = {name: counts(passes) for name, passes in found.items()}
    num_prompts = len(next(iter(tables.values()))[0])
    drawn = generator.integers(0, num_prompts, (NUM_RESAMPLES, num_prompts))
    resampled = {
        name: accepted[drawn].sum(1) / drafts[drawn].sum(1)
        for name, (drafts, accepted) in tables.items()
        if found[name][0]["counters"]["num_drafts"]  # plain has none
    }
    report: dict[str, Any] = {"variants": {}, "ratios": {}}
    for name, passes in found.items():
        drafts, accepted = tables[name]
        counters = [one["counters"] for one in passes]
        report["variants"][name] = {
            "counters": counters,
            "by_prompt": {"drafts": drafts.tolist(), "accepted": accepted.tolist()},
            "num_tokens": [one["num_tokens"] for one in passes],
        }
        if name not in resampled:
            continue
        num_drafts = sum(c["num_drafts"] for c in counters)
        positions = np.sum([c["accepted_per_position"] for c in counters], axis=0) / num_drafts
        report["variants"][name] |= {
            "mean_accepted": float(positions.sum()),
            "cumulative": [float(p) for p in positions],
            "per_pass": [c["num_accepted_tokens"] / c["num_drafts"] for c in counters],
            "by_prompts_mean_accepted": float(accepted.sum() / drafts.sum()),
            "interval": interval(resampled[name]),
        }
    for a, b in PAIRS:
        if a in resampled and b in resampled:
            whole = [tables[n][1].sum() / tables[n][0].sum() for n in (a, b)]
            report["ratios"][f"{a} / {b}"] = {
                "mean": float(whole[0] / whole[1]),
                "interval": interval(resampled[a] / resampled[b]),
            }
    return report


def same_requests(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[int]]:
    """Requests whose tokens equal those of the same pass of plain, and plain's own other passes."""
    if "plain" not in found:
        return {}
    plain = [one["outputs"] for one in found["plain"]]
    same = {
        name: [
            sum(a == b for a, b in zip(one["outputs"], text, strict=True))
            for one, text in zip(passes, plain, strict=True)
        ]
        for name, passes in found.items()
        if name != "plain"
    }
    again = [sum(a == b for a, b in zip(plain[0], text, strict=True)) for text in plain[1:]]
    return same | {"plain, first pass and the others": again}


def main(work: Path, out: Path, num_passes: int, concurrency: int) -> None:
    plan = engines.plan_of(work)
    names = [name for name in plan["acceptance"] if engines.is_ready(work, name)]
    found: dict[str, list[dict[str, Any]]] = {}

    def ask_all(name: str) -> None:
        passes = []
        for number in range(num_passes):
            try:
                passes.append(one_pass(work, name, plan, number, concurrency))
            except RuntimeError as error:
                print(error, flush=True)
                return
        found[name] = passes

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(ask_all, names))
    found = {name: found[name] for name in names if name in found}
    report: dict[str, Any] = {"schema_version": 1, "num_prompts": len(plan["prompts"])}
    report |= {"max_tokens": MAX_TOKENS, "concurrency": concurrency}
    report |= {key: plan[key] for key in ("hardware", "vllm_version", "predicted")}
    report |= summarize(found) | {"requests_equal_to_plain": same_requests(found)}
    out.write_text(json.dumps(report))
    for name, row in report["variants"].items():
        if "mean_accepted" in row:
            print(name, f"{row['mean_accepted']:.3f}", [round(x, 3) for x in row["per_pass"]],
                  "by prompts", f"{row['by_prompts_mean_accepted']:.3f}",
                  [round(x, 3) for x in row["interval"]])  # fmt: skip
    for name, ratio in report["ratios"].items():
        print(name, f"{ratio['mean']:.4f}", [round(x, 4) for x in ratio["interval"]])
    print(report["requests_equal_to_plain"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
