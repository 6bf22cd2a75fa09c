"""The replay against real, slow speculative decoding; the counters against their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graft.reader import Checkpoint
from mtp.acceptance import AcceptanceCounts, continue_prompts, measure, replay
from mtp.data.prompts import Prompt
from mtp.teacher import Teacher
from mtp.warm_start import head_from_base


def draft_routed(teacher, head, tokens, num_steps):
    """Each step's own layer over the whole window, ids shifted left, drafts appended."""
    hidden, last, work = teacher.hidden(torch.tensor([tokens[:-1]])), len(tokens) - 2, list(tokens)
    for k in range(num_steps):
        shifted = torch.tensor([work[k + 1 : k + 2 + last]])
        positions = torch.arange(last + 1)
        hidden = head.step(k % head.num_layers, hidden, teacher.embed(shifted), positions)
        work.append(int((teacher.lm_head @ hidden[0, -1]).argmax()))
    return work


def draft_stock(teacher, head, tokens, num_steps):
    """Layer 0 as one causal sequence: the window, then its own outputs at the next positions."""
    inputs, work = teacher.hidden(torch.tensor([tokens[:-1]])), list(tokens)
    for _ in range(num_steps):
        embeddings = teacher.embed(torch.tensor([work[1:]]))
        output = head.step(0, inputs, embeddings, torch.arange(inputs.shape[1]))[:, -1:]
        work.append(int((teacher.lm_head @ output[0, -1]).argmax()))
        inputs = torch.cat([inputs, output], dim=1)
    return work


def decode_speculatively(teacher, head, prompt, num_tokens, num_steps, draft):
    """Greedy speculative decoding as an engine does it: draft, verify, move on. No replay."""

    def greedy(tokens: list[int]) -> list[int]:
        logits = teacher.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.argmax(-1).tolist()

    counts = AcceptanceCounts(num_steps)
    tokens = [*prompt, greedy([*prompt])[-1]]
    while len(tokens) - len(prompt) < num_tokens:
        work = draft(teacher, head, tokens, num_steps)
        drafts, checked = work[len(tokens) :], greedy(work)
        accepted = 0
        while accepted < num_steps and drafts[accepted] == checked[len(tokens) - 1 + accepted]:
            accepted += 1
        counts.add_draft(accepted)
        tokens += [*drafts[:accepted], checked[len(tokens) - 1 + accepted]]
    return counts, tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("num_steps", "runtime"),
    [(2, "routed"), (4, "routed"), (8, "routed"), (4, "stock"), (6, "stock")],
)
def test_replay_counts_what_real_speculative_decoding_counts(few_words_base, num_steps, runtime):
    teacher = Teacher.load(few_words_base, device="cpu")
    torch.manual_seed(0)
    head = head_from_base(Checkpoint(few_words_base), 4, "last").eval()
    prompts = [
        Prompt(
            id=str(n),
            category="code" if n % 2 else "agent",
            token_ids=(n % 8, 3, 1, n % 5)[: 2 + n % 3],
        )
        for n in range(4)
    ]
    with torch.no_grad():
        text = continue_prompts(teacher, prompts, 24, num_steps)
        found = measure(teacher, head, text, num_steps=num_steps, runtime=runtime)
        draft = draft_routed if runtime == "routed" else draft_stock
        expected = AcceptanceCounts(num_steps)
        for prompt, continuation in zip(prompts, text.continuations, strict=True):
            counts, tokens = decode_speculatively(
                teacher, head, prompt.token_ids, 24, num_steps, draft
            )
            assert tokens[:24] == continuation[:24]  # speculation is lossless
            expected.merge(counts)
    assert found["num_drafts"] == expected.num_drafts
    assert found["accepted_per_position"] == expected.accepted_per_position
    assert 0 < found["mean_accepted"] < num_steps  # else this test would show nothing
    categories = found["by_category"].values()
    assert sum(c["num_drafts"] for c in categories) == found["num_drafts"]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=50))
def test_metrics_follow_their_definitions(rounds):
    counts = AcceptanceCounts(4)
    for accepted in rounds:
        counts.add_draft(accepted)
    metrics = counts.as_dict()
    assert metrics["mean_accepted"] == pytest.approx(sum(rounds) / len(rounds))
    assert metrics["acc_len"] == pytest.approx(1 + sum(rounds) / len(rounds))
    assert metrics["num_draft_tokens"] == 4 * len(rounds)
    assert metrics["acc_rate"] == pytest.approx(sum(rounds) / (4 * len(rounds)))
    for k in range(4):
        at = sum(a > k for a in rounds)
        before = sum(a >= k for a in rounds)
        assert metrics["cumulative"][k] == pytest.approx(at / len(rounds))
        assert metrics["conditional"][k] == pytest.approx(at / before if before else 0.0)


def test_replay_starts_after_each_accepted_run():
    #        prompt ---  continuation ------------
    tokens = [9, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    right = [[tokens[p + k + 2] if p + k + 2 < 13 else 0 for p in range(12)] for k in range(2)]
    right[0][5] = 0  # the draft of token 7, made at position 5, is wrong
    counts = replay(right, tokens, prompt_length=3, num_tokens=8)
    # starts 2 (2 accepted), 5 (0 accepted), 6 (2 accepted): tokens 3..10 are 8
    assert counts.num_drafts == 3
    assert counts.accepted_per_position == [2, 2]


def test_a_request_ends_at_its_end_token():
    tokens = [9, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    wrong = [[0] * 12, [0] * 12]
    assert replay(wrong, tokens, 3, 8, frozenset({3})).num_drafts == 2
    assert replay(wrong, tokens, 3, 8).num_drafts == 7


@pytest.mark.parametrize(("configured", "ends"), [(None, set()), (3, {3}), ([3, 5], {3, 5})])
def test_every_end_token_of_the_base_ends_a_request(few_words_base, configured, ends):
    """Qwen's generation configs name two: the end of a turn and the end of a text."""
    teacher = Teacher.load(few_words_base, device="cpu")
    teacher.model.generation_config.eos_token_id = configured
    prompt = Prompt(id="0", category="chat", token_ids=(1, 2))
    assert continue_prompts(teacher, [prompt], 2, 1).end_tokens == ends
