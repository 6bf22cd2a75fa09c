"""Serve one head with vLLM and count what is accepted: `python serve_head.py FOLDER`.

FOLDER/spec.json: what `routing_h200/worker.py` starts, `draft_sample_method`, `plan` (a file with
prompts and end tokens) and `runs`, each a name and a temperature. Writes FOLDER/result.json after
each run. An engine whose drafts can't be probabilistic starts again with greedy ones, and says so.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "routing_h200"))

import worker

from mtp.serving.probe import _counters, _difference

CONCURRENCY, MAX_TOKENS = 64, 200


def measure(llm: Any, spec: dict[str, Any], plan: dict[str, Any], run: dict[str, Any]) -> Any:
    """Drafts and accepted tokens of each prompt, and vLLM's own counters, of one pass."""
    order = list(range(len(plan["prompts"])))
    random.Random(run["seed"]).shuffle(order)
    num_steps = spec["num_speculative_tokens"]
    before = _counters(llm, num_steps)
    result = worker.generate(
        llm, [plan["prompts"][i] for i in order], CONCURRENCY, MAX_TOKENS, plan["end_tokens"],
        temperature=run["temperature"],
    )  # fmt: skip
    time.sleep(0.2)  # the counters arrive with the engine's next message
    counters = _difference(_counters(llm, num_steps), before)
    drafts, accepted = [0] * len(order), [0] * len(order)
    for prompt, steps in zip(order, result["increments"], strict=True):
        drafts[prompt] = len(steps) - 1  # the first increment is the prompt's own token
        accepted[prompt] = sum(steps[1:]) - len(steps[1:])
    return {
        **run, "seconds": result["seconds"], "counters": counters,
        "num_tokens": sum(map(len, result["outputs"])), "drafts": drafts, "accepted": accepted,
    }  # fmt: skip


def start(spec: dict[str, Any]) -> tuple[Any, str]:
    """The engine, and how it draws drafts."""
    method = spec["draft_sample_method"]
    try:
        return worker.start(spec | {"speculative": {"draft_sample_method": method}}), method
    except Exception:
        if method == "greedy":
            raise
        traceback.print_exc()
        return worker.start(spec), "greedy"


def main(folder: Path) -> None:
    spec = json.loads((folder / "spec.json").read_text())
    plan = json.loads(Path(spec["plan"]).read_text())
    started = time.monotonic()
    llm, method = start(spec)
    result: dict[str, Any] = {
        "schema_version": 1, "name": spec["name"], "head": spec["head"], "base": spec["base"],
        "runtime": spec["runtime"], "drafts": method,
        "seconds_to_start": time.monotonic() - started, "runs": [],
    }  # fmt: skip
    for run in spec["runs"]:
        result["runs"].append(measure(llm, spec, plan, run))
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
