"""The loss of an optimizer step against lists and `math`, as docs/losses.md defines it.

From recipe and rows to the number that is minimised: masks, padding, category and position weights,
micro-batches, runtimes. The hidden states are the draft's own; nothing of `mtp.losses` is used.
"""

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import rows_of_three_categories, tiny_recipe, write_training_base, write_training_data

from graft.reader import Checkpoint
from mtp.draft import MTPDraft
from mtp.held_out import held_out_text
from mtp.recipe import HeadRecipe, LossRecipe
from mtp.schedule import StepBatches
from mtp.teacher import Teacher


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    base = write_training_base(folder / "base")
    data = write_training_data(folder / "data", base)
    return base, data, rows_of_three_categories(data), Teacher.load(base, device="cpu")


def log_softmax(state, matrix, temperature):
    logits = [sum(a * b for a, b in zip(state, row, strict=True)) / temperature for row in matrix]
    top = max(logits)
    normaliser = top + math.log(sum(math.exp(logit - top) for logit in logits))
    return [logit - normaliser for logit in logits]


def plain_loss(draft, teacher, rows, batches, loss, runtime, num_steps):
    """The mean over all targets of the step, whatever micro-batch they lie in."""
    matrix, decay = teacher.lm_head.double().tolist(), loss.position_decay
    weights = loss.position_weights or [
        decay**k / sum(decay**j for j in range(num_steps)) for k in range(num_steps)
    ]
    total = 0.0
    for name in ("routed", "stock") if runtime == "both" else (runtime,):
        sums, counts, rejected, starts = [0.0] * num_steps, [0.0] * num_steps, 0.0, 0.0
        for batch in batches:
            with torch.no_grad():
                states = teacher.batch_hidden(batch)
                outputs = draft.head.chains(
                    name, states, teacher.embed(batch.input_ids), num_steps
                )[name]
            for place, index in enumerate(batch.rows):
                ids, mask = rows[index]["input_ids"], rows[index]["loss_mask"]
                weight = loss.category_weights.get(rows[index]["category"], 1.0)
                alphas = {}
                for k in range(num_steps):
                    for start in range(len(ids) - k - 2):
                        target = start + k + 2
                        if not mask[target]:
                            continue
                        p, q = (
                            log_softmax(state.double().tolist(), matrix, loss.temperature)
                            for state in (states[place, target - 1], outputs[k][place, start])
                        )
                        kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
                        alpha = sum(math.exp(min(a, b)) for a, b in zip(p, q, strict=True))
                        value = -loss.ce * q[ids[target]] + loss.kl * kl + loss.tv * (1 - alpha)
                        sums[k], counts[k] = sums[k] + weight * value, counts[k] + weight
                        alphas[k, start] = alpha
                for start in range(len(ids) - 2):
                    starts += weight * ((0, start) in alphas)
                    survival, k = 1.0, 0
                    while (k, start) in alphas and ((0, start) in alphas):
                        survival *= alphas[k, start]
                        rejected += weight * (1 - survival) / num_steps
                        k += 1
        total += sum(w * s / c for w, s, c in zip(weights, sums, counts, strict=True) if c)
        total += loss.e2e_tv * rejected / starts
    return total


CASES = [
    ("routed", 2, LossRecipe()),
    ("stock", 3, LossRecipe(kl=0.3, tv=0.5, e2e_tv=0.7, temperature=0.6,
                            category_weights={"a": 2.5, "b": 0.0})),
    ("both", 2, LossRecipe(kl=0.5, e2e_tv=1.0, position_weights=(0.2, 1.0),
                           category_weights={"c": 0.25})),
]  # fmt: skip


@pytest.mark.parametrize(("runtime", "num_steps", "loss"), CASES, ids=[c[0] for c in CASES])
def test_the_loss_of_a_step_is_that_of_the_definitions(place, runtime, num_steps, loss):
    base, data, rows, teacher = place
    recipe = dataclasses.replace(
        tiny_recipe(runtime=runtime, num_speculative_tokens=num_steps, micro_batch_tokens=60),
        loss=loss, head=HeadRecipe(num_layers=1 if runtime == "stock" else num_steps),
    )  # fmt: skip
    torch.manual_seed(1)
    text = held_out_text(teacher, base, data, recipe)
    draft = MTPDraft.from_base(Checkpoint(base), teacher, recipe, text)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    length = MTPDraft.min_length(recipe)
    batches = list(StepBatches(rows, recipe.train, min_length=length).micro_batches(3))
    assert len(batches) > 1
    totals = torch.stack([draft.target_weights(batch) for batch in batches]).sum(0)
    found = sum(draft(batch, totals, 0.0)[0].item() for batch in batches)
    wanted = plain_loss(draft, teacher, rows, batches, loss, runtime, num_steps)
    assert found == pytest.approx(wanted, rel=1e-5)
    # Negative control: a micro-batch that is divided by its own targets gives another number.
    parts = [draft(b, draft.target_weights(b), 0.0)[0].item() for b in batches]
    assert abs(sum(parts) / len(parts) / wanted - 1) > 1e-4
