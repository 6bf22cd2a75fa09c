"""Schedules and weights of the training loop."""

import itertools
import math

import pytest
import torch

from mtp.losses import position_weights
from mtp.recipe import LossRecipe, TrainRecipe
from mtp.train import learning_rate_factor


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


def test_position_weights_are_those_of_fastmtp():
    """beta 0.6: K=3 [.51, .31, .18], K=4 [.46, .28, .17, .10] (arXiv 2509.18362)."""
    for steps, expected in ((3, [0.51, 0.31, 0.18]), (4, [0.46, 0.28, 0.17, 0.10])):
        weights = position_weights(LossRecipe(position_decay=0.6), steps)
        torch.testing.assert_close(weights, torch.tensor(expected), atol=0.006, rtol=0)
