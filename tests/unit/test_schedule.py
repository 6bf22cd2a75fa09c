"""The learning rate, and the rows of each optimizer step, whoever computes them."""

import itertools
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import write_training_base, write_training_data

from graft.errors import UserError
from mtp.data.store import load_prepared
from mtp.recipe import TrainRecipe
from mtp.schedule import StepBatches, cut, learning_rate_factor


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedule")
    base = write_training_base(folder / "base")
    return load_prepared(write_training_data(folder / "data", base, num_rows=60))["train"]


def test_learning_rate_warms_up_and_falls_to_its_floor():
    settings = TrainRecipe(steps=110, warmup_steps=10, learning_rate=1e-3, min_learning_rate=1e-4)
    factors = [learning_rate_factor(settings, step) for step in range(111)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == pytest.approx(1.0)
    assert factors[60] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert factors[110] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))


def test_no_warm_up_starts_at_the_peak():
    assert learning_rate_factor(TrainRecipe(warmup_steps=0), 0) == pytest.approx(1.0)


def flat(parts):
    return [index for part in parts for index in part]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batch_tokens", [0, 45, 100])
def test_steps_have_the_same_rows_whoever_computes_them(rows, num_processes, micro_batch_tokens):
    recipe = TrainRecipe(tokens_per_batch=200, micro_batch_tokens=micro_batch_tokens)
    alone = StepBatches(rows, TrainRecipe(tokens_per_batch=200))
    shared = [
        StepBatches(rows, recipe, num_processes=num_processes, process=process)
        for process in range(num_processes)
    ]
    for step in range(12):
        wanted = flat(alone.row_indices(step))
        batches = [list(batches.micro_batches(step)) for batches in shared]
        assert len({len(own) for own in batches}) == 1, "all exchange gradients equally often"
        taken = [batch for own in batches for batch in own if batch.loss_mask.any()]
        assert sorted(i for batch in taken for i in batch.rows) == sorted(wanted)
        limit = micro_batch_tokens or 200
        assert all(batch.input_ids.numel() <= limit for own in batches for batch in own)
        assert {own.num_tokens(step) for own in shared} == {alone.num_tokens(step)}
        if not micro_batch_tokens:
            assert max(map(len, batches)) == 1, "a whole share at once"


def test_every_epoch_takes_each_row_once_in_another_order(rows):
    batches = StepBatches(rows, TrainRecipe(tokens_per_batch=200))
    steps, seen = [], 0
    while seen < 2 * len(rows):
        steps.append(flat(batches.row_indices(len(steps))))
        seen += len(steps[-1])
    order = flat(steps)
    first, second = order[: len(rows)], order[len(rows) :]
    assert Counter(first) == Counter(second) == Counter(range(len(rows)))
    assert first != second
    other = StepBatches(rows, TrainRecipe(tokens_per_batch=200, seed=1))
    assert flat(other.row_indices(0)) != steps[0]


def test_a_step_is_found_again_from_its_number_alone(rows):
    settings = TrainRecipe(tokens_per_batch=200)
    walked = StepBatches(rows, settings)
    forward = [walked.row_indices(step) for step in range(30)]
    assert walked.row_indices(3) == forward[3]  # back into an earlier epoch
    assert StepBatches(rows, settings).row_indices(29) == forward[29]


def test_batches_hold_the_rows_padded_on_the_right(rows):
    batches = StepBatches(rows, TrainRecipe(tokens_per_batch=200), min_length=12)
    for step in range(8):
        for batch in batches.micro_batches(step):
            assert batch.input_ids.shape == batch.loss_mask.shape and batch.input_ids.shape[1] >= 12
            for index, ids, mask, length in zip(
                batch.rows, batch.input_ids, batch.loss_mask, batch.lengths.tolist(), strict=True
            ):
                assert ids[:length].tolist() == rows[index]["input_ids"]
                assert mask[:length].tolist() == rows[index]["loss_mask"]
                assert not ids[length:].any() and not mask[length:].any()


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(50, 400),
)
@settings(deadline=None)
def test_cut_keeps_order_and_budget(lengths, budget):
    parts = cut(np.array(lengths), budget)
    assert flat(parts) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[i] for i in part) <= budget for part in parts)
    for left, right in itertools.pairwise(parts):  # no part could have taken the next row
        joined = [*left, right[0]]
        assert len(joined) * max(lengths[i] for i in joined) > budget


@pytest.mark.parametrize("key", ["tokens_per_batch", "micro_batch_tokens"])
def test_a_row_longer_than_a_budget_is_refused(rows, key):
    with pytest.raises(UserError, match=f"{key} of at least the longest row"):
        StepBatches(rows, TrainRecipe(**{key: 20}))


def test_rows_that_are_all_too_short_for_the_last_layer_are_refused(rows):
    longest = max(map(len, rows["input_ids"]))
    StepBatches(rows, TrainRecipe(), min_length=longest)
    with pytest.raises(UserError, match=f"a training row of at least {longest + 1} tokens"):
        StepBatches(rows, TrainRecipe(), min_length=longest + 1)


def test_spare_micro_batches_supervise_nothing(rows):
    recipe = TrainRecipe(tokens_per_batch=200, micro_batch_tokens=100)
    shared = [StepBatches(rows, recipe, num_processes=3, process=p) for p in range(3)]
    spare = [b for s in range(6) for own in shared for b in own.micro_batches(s)
             if not b.loss_mask.any()]  # fmt: skip
    assert spare and all(torch.is_tensor(b.input_ids) and b.input_ids.numel() for b in spare)
