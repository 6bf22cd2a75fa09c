"""How often the plugin's Python runs in a decode step, and what a call of it costs.

    python calls.py WORK OUT.json   # WORK of `variants.py shape`, its engine `counted` running

Two processes of the same code differ by several per cent at one request, so comparing engines
cannot show 1 % there. Counting can: CUDA graphs replay what was recorded, without Python.
"""

from __future__ import annotations

import json
import sys
import timeit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines

TOKENS = (8, 208)
CONCURRENCIES = (1, 16, 64)


def seconds_a_call() -> float:
    """What the plugin's forward adds to calling the predictor itself."""
    from mtp.serving.vllm_plugin import pass_index_on

    def predictor(*arguments: Any) -> None: ...

    model = SimpleNamespace(model=predictor)
    pass_index_on(model)
    routed = min(timeit.repeat(lambda: model.forward(1, 2, 3, None, None, spec_step_idx=1)))
    direct = min(timeit.repeat(lambda: predictor(1, 2, 3, None, None, 1)))
    return (routed - direct) / 1e6  # timeit's default number of calls


def main(work: Path, out: Path) -> None:
    prompts, calls, rows = engines.plan_of(work)["prompts"], work.parent / "calls", []
    for concurrency in CONCURRENCIES:
        counts = []
        for tokens in (TOKENS[0], *TOKENS):  # the first warms up
            before = calls.stat().st_size if calls.exists() else 0
            request = {"prompts": prompts[:concurrency], "concurrency": concurrency}
            found = engines.ask(work, "counted", request | {"max_tokens": tokens})
            counts.append((calls.stat().st_size - before, found["num_steps"], found["median_step"]))
        (few, few_steps, _), (many, many_steps, median) = counts[1:]
        rows.append({
            "concurrency": concurrency, "calls": [few, many], "steps": [few_steps, many_steps],
            "calls_a_decode_step": (many - few) / (many_steps - few_steps), "median_step": median,
        })  # fmt: skip
        print(rows[-1], flush=True)
    report = {"schema_version": 1, "seconds_a_call": seconds_a_call(), "rows": rows}
    print("seconds a call:", report["seconds_a_call"])
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
