"""Memory of one long row is linear in its length: no [T, T] mask and no [T, vocabulary] logits.

benchmarks/long_rows/measure.py takes the same measurement up to 32,768 tokens.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from live_memory import LiveMemory, RandomStates, long_row_draft, memory_of_a_step
from random_bases import save_random_base

from mtp.acceptance import Continuations, draft_tokens, measure
from mtp.data.prompts import Prompt

VOCABULARY = 1024
LENGTHS = (512, 1024, 2048)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "base"
    return save_random_base(folder, vocab_size=VOCABULARY, layer_types=["full_attention"])


def growth(draft):
    """How much faster memory grows over the second doubling than over a straight line, and the
    largest tensor's bytes at each length."""
    found = [memory_of_a_step(draft, length, VOCABULARY) for length in LENGTHS]
    first, second, third = (memory.peak for memory in found)
    return (third - second) / (second - first) / 2, [memory.largest[0] for memory in found]


@pytest.mark.parametrize(
    ("runtime", "checkpointing"), [("routed", True), ("stock", True), ("both", False)]
)
def test_memory_grows_with_the_length_and_not_faster(base, runtime, checkpointing):
    slope, largest = growth(long_row_draft(base, runtime=runtime, checkpointing=checkpointing))
    assert 0.9 < slope < 1.05
    assert largest[0] == largest[1] == largest[2]  # a chunk of logits, at any length


class KeepsMask(RandomStates):
    def batch_hidden(self, batch):
        length = batch.input_ids.shape[1]
        self.kept = torch.ones(length, length, dtype=torch.bool)
        return super().batch_hidden(batch)


class KeepsLogits(RandomStates):
    def batch_hidden(self, batch):
        hidden = super().batch_hidden(batch)
        self.kept = hidden @ self.lm_head.T
        return hidden


def test_a_mask_or_whole_logits_would_be_seen(base):
    draft = long_row_draft(base, runtime="routed", checkpointing=True)
    draft._teacher.__class__ = KeepsMask
    assert growth(draft)[0] > 1.1
    draft._teacher.__class__ = KeepsLogits
    assert growth(draft)[1][2] == 4 * LENGTHS[2] * VOCABULARY


@pytest.mark.parametrize("runtime", ["routed", "stock", "both"])
def test_activation_checkpointing_saves_memory_and_changes_no_gradient(base, runtime):
    gradients, peaks = [], []
    for checkpointing in (False, True):
        draft = long_row_draft(base, runtime=runtime, checkpointing=checkpointing)
        peaks.append(memory_of_a_step(draft, LENGTHS[1], VOCABULARY).peak)
        gradients.append({n: p.grad for n, p in draft.named_parameters() if p.grad is not None})
    assert peaks[1] < 0.7 * peaks[0]
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_measuring_after_a_long_prompt_needs_no_logits_of_it(base):
    draft = long_row_draft(base, runtime="routed", checkpointing=False)
    source, length = draft._teacher, 1024
    tokens = torch.randint(0, VOCABULARY, (length + 13,)).tolist()
    prompt = Prompt(id="long", category="code", token_ids=tuple(tokens[:length]))
    states = torch.randn(length + 13, 32)
    text = Continuations([prompt], [tokens[length:]], [states], 8, frozenset())
    with LiveMemory() as memory:
        measure(source, draft.head, text)
    assert memory.largest[0] < length * VOCABULARY
    with LiveMemory() as memory:  # negative control: asked for every start
        draft_tokens(source, draft.head, tokens, states, 4)
    assert memory.largest[0] > 4 * length * VOCABULARY
