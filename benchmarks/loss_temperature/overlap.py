"""What a head's drafts are worth at a temperature, greedy or drawn, teacher-forced.

    python benchmarks/loss_temperature/overlap.py BASE DATA RECIPE OUT.json HEAD...

With p the base's and q the head's distribution at temperature T, a step's chance to be accepted is
sum min(p, q) when drafts are drawn from q (`draft_sample_method: probabilistic`), and p of q's
most probable token when they are not (vLLM's default). `unlikely` is the mass of q on tokens that
p gives less than 1e-3. For each of four steps, means over the base's greedy continuations of
held-out prompts, whatever T.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from mtp.acceptance import continue_prompts
from mtp.data.prompts import evaluation_prompts
from mtp.head import load_head
from mtp.recipe import load_recipe
from mtp.teacher import Teacher

NUM_STEPS = 4
NAMES = ("drawn", "greedy", "unlikely")
TEMPERATURES = (0.3, 0.6, 1.0)


@torch.no_grad()
def main(base: Path, data: Path, recipe: Path, out: Path, heads: list[Path]) -> None:
    settings, teacher = load_recipe(recipe).eval, Teacher.load(base)
    prompts = evaluation_prompts(
        data, num_prompts=settings.num_prompts, max_prompt_tokens=settings.max_prompt_tokens
    )
    text = continue_prompts(teacher, prompts, settings.num_tokens, NUM_STEPS)
    report = {}
    for folder in heads:
        head = load_head(folder).to(teacher.device).eval()
        sums = {t: torch.zeros(3, NUM_STEPS, dtype=torch.float64) for t in TEMPERATURES}
        num_tokens = 0
        for prompt, tokens, states in zip(prompts, text.rows(), text.states, strict=True):
            start, ids = len(prompt.token_ids) - 1, torch.tensor([tokens])
            hidden = states[None].to(next(head.parameters()).dtype)
            outputs = head.chain(hidden, teacher.embed(ids).to(hidden.dtype), NUM_STEPS)
            # Step k at p guesses token p+k+2, which the base's state at p+k+1 says.
            starts = torch.arange(start, len(tokens) - NUM_STEPS - 1)
            num_tokens += len(starts)
            for step, output in enumerate(outputs):
                theirs = F.linear(hidden[0, starts + step + 1], teacher.lm_head).double()
                ours = F.linear(output[0, starts], teacher.lm_head).double()
                for temperature, found in sums.items():
                    p, q = (theirs / temperature).softmax(-1), (ours / temperature).softmax(-1)
                    found[0, step] += torch.minimum(p, q).sum()
                    found[1, step] += p.gather(-1, ours.argmax(-1, keepdim=True)).sum()
                    found[2, step] += (q * (p < 1e-3)).sum()
        report[folder.name] = {
            str(t): dict(zip(NAMES, (s / num_tokens).tolist(), strict=True))
            for t, s in sums.items()
        }
        print(folder.name, json.dumps(report[folder.name]), flush=True)
    found = {"schema_version": 1, "num_tokens": num_tokens, "heads": report}
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]), [Path(name) for name in sys.argv[5:]])
