"""Acceptance of several heads on the same continuations, whatever trained them.

    python benchmarks/replay_heads.py BASE DATA RECIPE OUT.json HEAD=RUNTIME...

RUNTIME is routed or stock, for four speculative tokens: `mtp eval` takes the number from the head's
own recipe, which a head of another trainer does not have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from graft.manifest import HeadFolder
from mtp.acceptance import continue_prompts
from mtp.data.prompts import evaluation_prompts
from mtp.recipe import load_recipe
from mtp.teacher import Teacher
from quantize.gate import replay_head

NUM_STEPS = 4


def main(base: Path, data: Path, recipe: Path, out: Path, heads: list[str]) -> None:
    settings, teacher = load_recipe(recipe).eval, Teacher.load(base)
    prompts = evaluation_prompts(
        data, num_prompts=settings.num_prompts, max_prompt_tokens=settings.max_prompt_tokens
    )
    text = continue_prompts(teacher, prompts, settings.num_tokens, NUM_STEPS)
    report = {}
    for head in heads:
        folder, runtime = head.split("=")
        found = replay_head(teacher, HeadFolder(Path(folder)), text, NUM_STEPS, runtime).metrics
        report[f"{Path(folder).name} {runtime}"] = found
        print(folder, runtime, f"{found['mean_accepted']:.3f}", found["num_drafts"], flush=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]), sys.argv[5:])
