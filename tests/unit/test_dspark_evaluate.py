"""Free-running drafts against a loop that drafts as the engine does; the reference's table against
speculators' definitions, written out."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from dspark_reference import block_hidden, slot_logits
from dspark_tiny import TINY, random_draft

from mtp.acceptance import Continuations, replay
from mtp.data.prompts import Prompt
from mtp.dspark.anchors import Blocks
from mtp.dspark.evaluate import ForcedTable, Measured, measure, validate
from mtp.dspark.loss import SlotTerms
from mtp.dspark.vocabulary import DraftVocabulary

NUM_TOKENS, PROMPT, NUM_SLOTS = 15, 5, 3
KEPT = torch.arange(0, 24, 2)


@pytest.fixture(scope="module")
def case():
    generator = torch.Generator().manual_seed(2)
    embedding = torch.randn(24, 16, generator=generator)
    source = SimpleNamespace(
        device=torch.device("cpu"),
        lm_head=torch.randn(24, 16, generator=generator),
        embed=lambda ids: F.embedding(ids, embedding),
        autocast=lambda: torch.autocast("cpu", enabled=False),
    )
    measured = Measured(
        source=source, model=random_draft(),
        vocabulary=DraftVocabulary(kept=KEPT, vocab_size=24), num_slots=NUM_SLOTS,
    )  # fmt: skip
    ids = torch.randint(0, 24, (NUM_TOKENS,), generator=generator)
    states = torch.randn(NUM_TOKENS, 48, generator=generator)
    return measured, ids, states, embedding


def engine_draft(case, start):
    """One round, as vLLM drafts it: a block, then token by token with its own last token."""
    measured, ids, states, embedding = case
    weights = {name: t.double() for name, t in measured.model.state_dict().items()}
    anchor = start + 1
    block = torch.tensor([int(ids[anchor]), TINY.mask_token_id, TINY.mask_token_id])
    hidden = block_hidden(
        TINY, weights, states[:anchor, :32].double(), embedding[block].double(), anchor
    )
    previous, drafted = int(ids[anchor]), []
    for slot in range(NUM_SLOTS):
        logits, _ = slot_logits(weights, hidden[slot], previous)
        previous = int(KEPT[int(logits.argmax())])
        drafted.append(previous)
    return drafted


def test_free_running_drafts_are_the_engines(case):
    measured, ids, states, _ = case
    drafts = measured.drafts(ids, states, PROMPT - 1)
    assert [column[: PROMPT - 1] for column in drafts] == [[-1] * (PROMPT - 1)] * NUM_SLOTS
    for start in (PROMPT - 1, 7, 12):
        assert [column[start] for column in drafts] == engine_draft(case, start)
    # Teacher forcing is another thing after the first miss: the true token before, not its own.
    forced = measured.model.markov_head.markov_w1.weight.detach().clone()
    with torch.no_grad():
        measured.model.markov_head.markov_w1.weight.zero_()
        without = measured.drafts(ids, states, PROMPT - 1)
        measured.model.markov_head.markov_w1.weight.copy_(forced)
    assert without != drafts


def test_replay_counts_from_the_anchor_after_the_prompt(case):
    """Slot k of the block at `start + 1` guesses token start+k+2: one changed, one not accepted."""
    tokens = case[1].tolist()
    drafts = [[-1] * NUM_TOKENS for _ in range(NUM_SLOTS)]
    for slot in range(NUM_SLOTS):
        drafts[slot][PROMPT - 1] = tokens[PROMPT + slot + 1]
    counts = replay(drafts, tokens, PROMPT, 3)
    assert counts.accepted_per_position == [1, 1, 1]
    drafts[1][PROMPT - 1] += 1
    assert replay(drafts, tokens, PROMPT, 2).accepted_per_position == [1, 0, 0]


def terms_of(tv, agrees, sure, missed):
    tv, agrees, sure, missed = (torch.tensor(values) for values in (tv, agrees, sure, missed))
    zeros = torch.zeros_like(tv)
    return SlotTerms(ce=zeros, tv=tv, confidence=zeros, agrees=agrees, sure=sure, missed=missed)


def test_the_table_is_the_references_by_hand():
    """Two blocks of three: one with three live slots, one with two; a third has none."""
    live = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    table = ForcedTable(3)
    table.add(
        terms_of(
            [0.5, 0.2, 0.0, 0.1, 0.5],
            [1.0, 0.0, 1.0, 1.0, 1.0],
            [0.5, 0.9, 1.0, 0.9, 0.28],
            [0.1, 0.2, 0.0, 0.1, 0.5],
        ),
        live,
    )
    found = table.as_dict()
    assert found["num_blocks"] == 2
    first, second = 1 + 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 1.0, 1 + 0.9 + 0.9 * 0.5
    assert found["accept_len"] == pytest.approx((first + second) / 2)
    assert found["greedy_accept_len"] == pytest.approx((1 + 1 + 1 + 2) / 2)
    assert found["accept_rate"] == pytest.approx((0.5 + 0.8 + 1 + 0.9 + 0.5) / 5)
    assert found["position_acc"] == pytest.approx([1.0, 0.5, 1.0])
    assert found["position_accept_rate"] == pytest.approx([0.7, 0.65, 1.0])
    assert found["full_acc"] == pytest.approx(4 / 5)
    assert found["missed_mass"] == pytest.approx(0.9 / 5)
    assert found["confidence_abs_error"] == pytest.approx((0 + 0.1 + 0 + 0 + 0.22) / 5)
    prefixes = (0.5 - 0.5) + (0.45 - 0.4) + (0.45 - 0.4) + (0.9 - 0.9) + (0.252 - 0.45)
    assert found["confidence_cumprod_bias"] == pytest.approx(prefixes / 5)
    # Bins .5, .9 (two), 1 joins .9's bin, .28: only their sums need to agree.
    assert found["calibration_error"] == pytest.approx((0 + abs(2.8 - 2.7) + abs(0.28 - 0.5)) / 5)
    wanted = {"slots": 1, "confidence": pytest.approx(0.28), "accept_rate": pytest.approx(0.5)}
    assert found["calibration"][2] == wanted
    assert sum(bin["slots"] for bin in found["calibration"]) == 5


def test_validation_takes_the_same_few_anchors_every_time(case):
    measured, ids, states, _ = case
    row = (3, ids, torch.ones(NUM_TOKENS, dtype=torch.bool), states)
    first = validate(measured, [row, row], max_anchors=2)
    assert first["num_blocks"] == 4
    assert validate(measured, [row, row], max_anchors=2) == first


def test_forced_terms_lie_where_their_slots_are(case):
    """A row's only live slot at p+1 fills the table's second position."""
    measured, ids, states, _ = case
    live = torch.zeros(1, 1, 4, dtype=torch.bool)
    live[0, 0, 1] = True
    table = ForcedTable(4)
    measured.forced(ids, states, Blocks(anchors=torch.tensor([[6]]), live=live), table)
    assert table.live.tolist() == [0, 1, 0, 0]
    weights = {name: t.double() for name, t in measured.model.state_dict().items()}
    embedding = case[3]
    block = torch.tensor([int(ids[6]), *[TINY.mask_token_id] * 3])
    hidden = block_hidden(TINY, weights, states[:6, :32].double(), embedding[block].double(), 6)
    logits, _ = slot_logits(weights, hidden[1], int(ids[7]))
    base = (measured.source.lm_head.double() @ states[7, 32:].double()).softmax(0)
    overlap = torch.minimum(logits.softmax(0), base[KEPT]).sum()
    assert float(table.accepted[1]) == pytest.approx(float(overlap), rel=1e-4)


def test_what_the_base_was_made_to_say_after_its_reply_is_not_measured(case):
    """The table of a reply that ends at its fourth token is that of its blocks up to there."""
    measured, ids, states, _ = case
    tokens = ids.tolist()
    end = tokens[PROMPT + 3]
    assert end not in tokens[PROMPT : PROMPT + 3]

    def table(end_tokens):
        prompt = Prompt(id="a", token_ids=tuple(tokens[:PROMPT]), category="chat")
        text = Continuations([prompt], [tokens[PROMPT:]], [states], 4, frozenset(end_tokens))
        return measure(measured, text)["teacher_forced"]

    # Anchors at 5, 6, 7 with 3, 2, 1 slots up to the end at 8; each has four tokens behind it.
    found = ForcedTable(4)
    live = torch.tensor([[[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]]).bool()
    measured.forced(ids, states, Blocks(anchors=torch.tensor([[5, 6, 7]]), live=live), found)
    assert table({end}) == found.as_dict()
    assert table({end})["num_blocks"] == 3
    assert table(set())["num_blocks"] == NUM_TOKENS - PROMPT - 4
