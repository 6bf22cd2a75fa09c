"""The MTP head behind the trainer's interface."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import tiny_recipe, write_training_base, write_training_data

from graft.reader import Checkpoint
from mtp.data.store import load_prepared
from mtp.draft import MTPDraft
from mtp.held_out import held_out_text
from mtp.losses import align, position_weights
from mtp.recipe import LossRecipe
from mtp.schedule import StepBatches
from mtp.teacher import Teacher


@pytest.fixture(scope="module")
def draft_and_batches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    base = write_training_base(folder / "base")
    data = write_training_data(folder / "data", base)
    recipe = tiny_recipe()
    torch.manual_seed(0)
    teacher = Teacher.load(base)
    text = held_out_text(teacher, base, data, recipe)
    draft = MTPDraft.from_base(Checkpoint(base), teacher, recipe, text)
    return draft, StepBatches(load_prepared(data)["train"], recipe.train, min_length=4)


def test_target_weights_are_what_alignment_finds(draft_and_batches):
    draft, batches = draft_and_batches
    for step in range(4):
        for batch in batches.micro_batches(step):
            width = batch.input_ids.shape[1]
            outputs = [torch.zeros(len(batch.rows), width - 1 - k, 1) for k in range(2)]
            hidden = torch.zeros(*batch.input_ids.shape, 1)
            aligned = align(outputs, hidden, batch.input_ids, batch.loss_mask, 2)
            assert torch.equal(aligned.counts(), draft.target_weights(batch))


def test_shares_of_micro_batches_add_up_to_the_batch(draft_and_batches):
    """Against the mean of means, which is another number."""
    draft, batches = draft_and_batches
    (batch,) = batches.micro_batches(0)
    totals = draft.target_weights(batch)
    whole, statistics = draft(batch, totals, 0.0)
    parts = []
    for row in range(len(batch.rows)):
        one = type(batch)(
            input_ids=batch.input_ids[row : row + 1], loss_mask=batch.loss_mask[row : row + 1],
            lengths=batch.lengths[row : row + 1], categories=batch.categories[row : row + 1],
            rows=batch.rows[row : row + 1],
        )  # fmt: skip
        parts.append((one, *draft(one, totals, 0.0)))
    torch.testing.assert_close(sum(loss for _, loss, _ in parts), whole, rtol=1e-5, atol=0)
    for name, wanted in statistics.items():
        found = sum(shares[name] for _, _, shares in parts)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    means = [draft(one, draft.target_weights(one), 0.0)[0] for one, _, _ in parts]
    assert abs(torch.stack(means).mean() / whole - 1) > 1e-3


def test_a_batch_without_targets_gives_zero_and_reaches_every_weight(draft_and_batches):
    draft, batches = draft_and_batches
    batch = next(batches.micro_batches(0)).without_targets()
    loss, _ = draft(batch, torch.ones(2), 0.0)
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())
    draft.zero_grad(set_to_none=True)


def test_position_weights_are_those_of_fastmtp():
    """beta 0.6: K=3 [.51, .31, .18], K=4 [.46, .28, .17, .10] (arXiv 2509.18362)."""
    for steps, expected in ((3, [0.51, 0.31, 0.18]), (4, [0.46, 0.28, 0.17, 0.10])):
        weights = position_weights(LossRecipe(position_decay=0.6), steps)
        torch.testing.assert_close(weights, torch.tensor(expected), atol=0.006, rtol=0)
