"""Trained drafts of one base, of several seeds each, measured on the same continuations.

    python benchmarks/dspark_nano/table.py RECIPE BASE DATA OUT NAME=FOLDER,FOLDER... NAME=...

A folder is what `mtp train --draft dspark` or `theirs.py` wrote; the draft of zero steps is
measured too. OUT.json holds every measurement, OUT.md mean and range, and how far the first name's
mean lies above each of the others'.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from graft.reader import Checkpoint
from mtp.data.store import load_prepared
from mtp.dspark.draft import DSparkDraft
from mtp.dspark.evaluate import Measured, measure
from mtp.dspark.export import load_draft
from mtp.held_out import held_out_text
from mtp.recipe import load_recipe
from mtp.teacher import Teacher

COLUMNS = {
    "acc-len, free running": lambda found: found["acc_len"],
    "accept-len": lambda found: found["teacher_forced"]["accept_len"],
    "full acc": lambda found: found["teacher_forced"]["full_acc"],
}


def markdown(found: dict[str, list[dict]]) -> str:
    """A row a name: mean (lowest to highest), and the first row's mean over this one's."""
    lines = ["| | seeds | " + " | ".join(f"{name} | first row" for name in COLUMNS) + " |"]
    lines.append("|---|---" + "|---|---" * len(COLUMNS) + "|")
    first: dict[str, float] = {}
    for name, drafts in found.items():
        cells = []
        for column, read in COLUMNS.items():
            values = [read(draft) for draft in drafts]
            mean = sum(values) / len(values)
            above = first.setdefault(column, mean) / mean - 1
            cells += [f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})", f"{above:+.1%}"]
        lines.append(f"| {name} | {len(drafts)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(recipe_file: Path, base: Path, data: Path, out: Path, groups: list[str]) -> None:
    recipe = load_recipe(recipe_file)
    teacher = Teacher.load(base, device="cpu")
    text = held_out_text(teacher, base, data, recipe)
    found: dict[str, list[dict]] = {}
    torch.manual_seed(recipe.train.seed)
    rows = load_prepared(data)["train"]
    zero = DSparkDraft.from_base(Checkpoint(base), teacher, recipe, text, rows).evaluate()
    for group in groups:
        name, folders = group.split("=")
        for folder in folders.split(","):
            model, vocabulary = load_draft(Path(folder))
            measured = Measured(
                source=teacher, model=model, vocabulary=vocabulary,
                num_slots=recipe.dspark.num_speculative_tokens,
            )  # fmt: skip
            found.setdefault(name, []).append({"folder": folder, **measure(measured, text)})
    found["zero steps"] = [zero]
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]), sys.argv[5:])
