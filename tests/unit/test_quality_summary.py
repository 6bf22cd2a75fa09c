"""The quality benchmark's ratios: paired on prompts, resampled by conversation."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "quality_h200"))

from summarize import bootstrap, summarize

NUM_PROMPTS = 60


def run_of(accepted, drafts):
    positions = [int(accepted.sum()), 0, 0, 0]
    counters = {"num_drafts": int(drafts.sum()), "accepted_per_position": positions}
    return {"drafts": drafts.tolist(), "accepted": accepted.tolist(), "counters": counters}


@pytest.fixture
def table():
    """Prompts differ far more than heads do: ours accepts a tenth more on each."""
    generator = np.random.default_rng(3)
    drafts = generator.integers(20, 60, NUM_PROMPTS)
    theirs = (drafts * generator.uniform(0.5, 3.0, NUM_PROMPTS)).astype(int) * 10
    return {
        ("speculators-post", "stock"): run_of(theirs, drafts * 10),
        ("stock-kl", "stock"): run_of(theirs * 105 // 100, drafts * 10),
        ("routed-kl", "routed"): run_of(theirs * 11 // 10, drafts * 10),
    }


def ratio(summary, head, label):
    row = next(row for row in summary["rows"] if row["head"] == head)
    return row["ratios"][label]


def test_pairing_leaves_the_prompts_own_spread_out(table):
    times = bootstrap([str(i) for i in range(NUM_PROMPTS)])
    summary = summarize(table, times)
    found = ratio(summary, "routed-kl", "speculators-post")
    assert found["mean"] == pytest.approx(1.1)
    assert found["interval"] == pytest.approx([1.1, 1.1])
    assert ratio(summary, "routed-kl", "our best stock")["mean"] == pytest.approx(1.1 / 1.05, 0.01)
    # Unpaired, the same two heads could not be told apart.
    low, high = summary["rows"][0]["interval"]
    assert high / low > 1.2
    shuffled = dict(table)
    accepted = np.array(table["routed-kl", "routed"]["accepted"])[::-1]
    shuffled["routed-kl", "routed"] = run_of(
        accepted, np.array(table["routed-kl", "routed"]["drafts"])
    )
    low, high = ratio(summarize(shuffled, times), "routed-kl", "speculators-post")["interval"]
    assert low < 1.0 and high > 1.2


def test_prompts_of_a_conversation_are_drawn_together(table):
    alone = summarize(table, bootstrap([str(i) for i in range(NUM_PROMPTS)]))["rows"][0]
    # All prompts of one conversation: nothing is left to resample.
    together = summarize(table, bootstrap(["one"] * NUM_PROMPTS))["rows"][0]
    assert together["interval"] == pytest.approx([together["by_prompt"]] * 2)
    assert alone["interval"][0] < alone["by_prompt"] < alone["interval"][1]
