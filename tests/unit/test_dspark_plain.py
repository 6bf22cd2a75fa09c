"""The draft's loss of an optimizer step against plain loops, as docs/dspark.md defines it.

From rows to the number that is minimised: anchors, masks, what each slot reads and should say,
weights of slots and categories, micro-batches. The base's states are its own; of `mtp.dspark` only
the shape and the weights are used. A slot that is one token off would still learn something, so
nothing else would notice it.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from dspark_reference import block_hidden, slot_logits
from training import rows_of_three_categories, tiny_recipe, write_training_base, write_training_data

from graft.reader import Checkpoint
from mtp.dspark.draft import DSparkDraft
from mtp.held_out import held_out_text
from mtp.recipe import DSparkRecipe
from mtp.schedule import StepBatches
from mtp.teacher import Teacher

SIZE, LAYERS, MASK_TOKEN = 4, (1, 2), 15
WEIGHTS = {"a": 2.5, "b": 0.0}
RECIPE = replace(
    tiny_recipe(draft="dspark", micro_batch_tokens=60),
    loss=replace(tiny_recipe().loss, category_weights=WEIGHTS),
    dspark=DSparkRecipe(
        num_layers=2, block_size=SIZE, num_speculative_tokens=3, draft_vocab_size=10,
        aux_layers=LAYERS, full_attention_layers=(1,), sliding_window=6, mask_token_id=MASK_TOKEN,
        markov_rank=4, max_anchors=0, ce=0.3, tv=0.8, confidence=0.6, decay=2.0,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    base = write_training_base(folder / "base")
    data = write_training_data(folder / "data", base)
    rows = rows_of_three_categories(data)
    teacher = Teacher.load(base, device="cpu")
    text = held_out_text(teacher, base, data, RECIPE)
    draft = DSparkDraft.from_base(Checkpoint(base), teacher, RECIPE, text, rows)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    return draft, teacher, rows


def frequent(rows, size):
    counts = [0] * 16
    for row in rows:
        for token, counted in zip(row["input_ids"], row["loss_mask"], strict=True):
            counts[token] += counted
    return sorted(sorted(range(16), key=lambda token: (-counts[token], token))[:size])


def plain_row(draft, teacher, row, kept):
    """(slot, cross-entropy, TV, BCE of the confidence) of every supervised slot of a row."""
    weights = {name: p.detach().double() for name, p in draft.model.named_parameters()}
    ids, mask = row["input_ids"], row["loss_mask"]
    states = teacher.row_states([torch.tensor(ids)], LAYERS)[0].double()
    width = states.shape[1] // (len(LAYERS) + 1)
    embedding = teacher.embed(torch.arange(16)[None])[0].double()
    found = []
    for anchor in range(len(ids) - SIZE):
        if not (mask[anchor] and mask[anchor + 1]):
            continue
        block = embedding[[ids[anchor], *[MASK_TOKEN] * (SIZE - 1)]]
        aux = states[:anchor, : len(LAYERS) * width]
        hidden = block_hidden(draft.model.config, weights, aux, block, anchor)
        for slot in range(SIZE):
            if not mask[anchor + slot + 1]:
                break
            here = anchor + slot  # the last token that is known, or was just drafted
            logits, sure = slot_logits(weights, hidden[slot], ids[here])
            q = logits.softmax(0)
            p = (teacher.lm_head.double() @ states[here, len(LAYERS) * width :]).softmax(0)
            overlap = sum(float(torch.minimum(p[token], q[i])) for i, token in enumerate(kept))
            top = int(p.argmax())
            ce = -math.log(q[kept.index(top)]) if top in kept else 0.0
            sure = 1 / (1 + math.exp(-float(sure)))
            bce = -overlap * math.log(sure) - (1 - overlap) * math.log(1 - sure)
            found.append((slot, ce, 1 - overlap, bce))
    return found


def test_the_loss_of_a_step_is_that_of_the_definitions(case):
    draft, teacher, rows = case
    settings, kept = RECIPE.dspark, frequent(rows, 10)
    batches = list(StepBatches(rows, RECIPE.train).micro_batches(1))
    assert len(batches) > 1
    total = count = 0.0
    distances, counts = [0.0] * SIZE, [0.0] * SIZE
    for index in (index for batch in batches for index in batch.rows):
        weight = WEIGHTS.get(rows[index]["category"], 1.0)
        for slot, ce, tv, bce in plain_row(draft, teacher, rows[index], kept):
            distance = settings.ce * ce + settings.tv * tv
            decay = math.exp(-slot / settings.decay)
            total += weight * decay * (distance + settings.confidence * bce)
            count += weight
            distances[slot] += weight * distance
            counts[slot] += weight
    assert min(counts) > 0
    totals = torch.stack([draft.target_weights(batch) for batch in batches]).sum(0)
    assert totals.tolist() == pytest.approx(counts)
    with torch.no_grad():
        parts = [draft(batch, totals, 0.0) for batch in batches]
    assert sum(float(loss) for loss, _ in parts) == pytest.approx(total / count, rel=1e-5)
    by_slot = sum(statistics["loss_per_position"] for _, statistics in parts).tolist()
    wanted = [distance / n for distance, n in zip(distances, counts, strict=True)]
    assert by_slot == pytest.approx(wanted, rel=1e-5)
