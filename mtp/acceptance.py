"""What vLLM will measure, offline: a replay of greedy speculative decoding.

The base continues each prompt greedily. On that text the chain is run once over the whole window,
which gives the draft of every step at every start; under greedy decoding a draft only counts
when all before it were right, so each step's inputs are the base's own tokens and the replay is
exact. Drafting starts where it would: at the end of the prompt, then a+1 tokens further, a being
the number just accepted.

Definitions (those of vLLM's counters): acceptance at position k is accepted at k / drafts, so it
is cumulative; conditional acceptance is given that all before were accepted; mean accepted is
accepted tokens / drafts, without the bonus token; acc-len is 1 + mean accepted; the draft
acceptance rate is accepted / drafted tokens. One "draft" is one round of K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from graft.errors import UserError
from graft.reader import Checkpoint
from mtp.data.prompts import Prompt, evaluation_prompts
from mtp.data.store import require_tokenizer_of
from mtp.head import MTPHead, load_head, open_head
from mtp.progress import track
from mtp.recipe import EvalRecipe, trained_for
from mtp.teacher import Teacher
from mtp.teacher.source import HiddenSource

SCHEMA_VERSION = 1
Runtime = Literal["routed", "stock"]


@dataclass
class AcceptanceCounts:
    """Counters as vLLM keeps them, for K positions."""

    num_positions: int
    num_drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_per_position = self.accepted_per_position or [0] * self.num_positions

    def add_draft(self, num_accepted: int) -> None:
        """Count one round of which the first `num_accepted` tokens were accepted."""
        self.num_drafts += 1
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def merge(self, other: AcceptanceCounts) -> None:
        self.num_drafts += other.num_drafts
        for position, count in enumerate(other.accepted_per_position):
            self.accepted_per_position[position] += count

    def as_dict(self) -> dict[str, Any]:
        """The metrics of the module's docstring, with the counters they come from."""
        drafts = max(self.num_drafts, 1)
        cumulative = [count / drafts for count in self.accepted_per_position]
        before = [self.num_drafts, *self.accepted_per_position[:-1]]
        conditional = [
            count / previous if previous else 0.0
            for count, previous in zip(self.accepted_per_position, before, strict=True)
        ]
        mean_accepted = sum(cumulative)
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_drafts * self.num_positions,
            "accepted_per_position": list(self.accepted_per_position),
            "cumulative": cumulative,
            "conditional": conditional,
            "mean_accepted": mean_accepted,
            "acc_len": 1 + mean_accepted,
            "acc_rate": mean_accepted / self.num_positions,
        }


def replay(
    drafts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    prompt_length: int,
    num_tokens: int,
    end_tokens: frozenset[int] = frozenset(),
) -> AcceptanceCounts:
    """Replay greedy speculative decoding of one continuation.

    Args:
        drafts: K sequences; drafts[k][p] is step k's draft when drafting starts at position p,
            its guess of token p+k+2.
        tokens: prompt and greedy continuation; long enough that every draft made can be checked
            (num_tokens + K beyond the prompt).
        prompt_length: tokens of the prompt.
        num_tokens: generated tokens after which the request ends (vLLM's max_tokens).
        end_tokens: a request also ends once one of these was generated.

    Returns:
        The counters. As in vLLM, a last round counts what it accepted even past the end.
    """
    counts = AcceptanceCounts(len(drafts))
    start = prompt_length - 1
    generated = 1  # the prompt's own forward pass yields one token
    while generated < num_tokens and not end_tokens.intersection(
        tokens[prompt_length : prompt_length + generated]
    ):
        accepted = 0
        while accepted < len(drafts) and (drafts[accepted][start] == tokens[start + accepted + 2]):
            accepted += 1
        counts.add_draft(accepted)
        start += accepted + 1
        generated += accepted + 1
    return counts


@torch.no_grad()
def draft_tokens(
    source: HiddenSource,
    head: MTPHead,
    tokens: Sequence[int],
    states: torch.Tensor,
    num_steps: int,
    runtime: Runtime = "routed",
    first: int = 0,
) -> list[list[int]]:
    """Drafts of every step at every start of one sequence: element [k][p] guesses token p+k+2.

    Args:
        source: the base's embedding and `lm_head`.
        head: the draft head.
        tokens: [T].
        states: [T, H] the base's hidden states of them, after its final norm.
        num_steps: tokens drafted a round.
        runtime: see `measure`.
        first: the first start that is asked for; before it there is -1, since logits of a long
            prompt would be the largest tensor of all.
    """
    ids = torch.tensor([list(tokens)], device=source.device)
    dtype = next(head.parameters()).dtype
    chain = head.chain if runtime == "routed" else head.chain_stock
    hidden = states.unsqueeze(0).to(source.device, dtype)
    outputs = chain(hidden, source.embed(ids).to(dtype), num_steps)
    lm_head = source.lm_head.to(dtype)
    guesses = [F.linear(output[0, first:], lm_head).argmax(-1).tolist() for output in outputs]
    return [[-1] * first + guess for guess in guesses]


@dataclass(frozen=True)
class Continuations:
    """Prompts and the base's greedy continuations, shared by every head that is compared.

    states: [T, H] each, in host memory: the base's hidden states after its final norm, of a prompt
    and its continuation; before them, for a draft that reads A more layers, their output ([T,
    (A + 1) * H]). With them, measuring needs no base.
    """

    prompts: list[Prompt]
    continuations: list[list[int]]
    states: list[torch.Tensor]
    num_tokens: int
    end_tokens: frozenset[int]

    def rows(self) -> list[list[int]]:
        """Prompt and continuation of each."""
        pairs = zip(self.prompts, self.continuations, strict=True)
        return [[*prompt.token_ids, *continuation] for prompt, continuation in pairs]

    def replay(self, number: int, drafts: Sequence[Sequence[int]]) -> AcceptanceCounts:
        """Replay prompt `number` with these drafts; see `replay`."""
        prompt = list(self.prompts[number].token_ids)
        tokens = [*prompt, *self.continuations[number]]
        return replay(drafts, tokens, len(prompt), self.num_tokens, self.end_tokens)


def num_checked(num_tokens: int, num_steps: int) -> int:
    """Tokens after the prompt that checking every draft needs: the last begins at the end."""
    return num_tokens + num_steps + 1


def continue_prompts(
    teacher: Teacher,
    prompts: list[Prompt],
    num_tokens: int,
    num_steps: int,
    layers: tuple[int, ...] = (),
) -> Continuations:
    """Let the base continue the prompts, far enough to check every draft."""
    continuations = teacher.continue_greedily(
        [prompt.token_ids for prompt in prompts], num_checked(num_tokens, num_steps)
    )
    texts = [
        torch.tensor([*prompt.token_ids, *continuation])
        for prompt, continuation in zip(prompts, continuations, strict=True)
    ]
    states = [teacher.row_states([text], layers)[0].cpu() for text in texts]
    configured = teacher.model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    end_tokens = frozenset(token for token in listed if token is not None)
    return Continuations(prompts, continuations, states, num_tokens, end_tokens)


def measure(
    source: HiddenSource,
    head: MTPHead,
    text: Continuations,
    *,
    num_steps: int | None = None,
    runtime: Runtime = "routed",
) -> dict[str, Any]:
    """Acceptance of a head on the base's own continuations.

    Args:
        source: the base's embedding and `lm_head`.
        head: the draft head, on the source's device.
        text: from `continue_prompts`.
        num_steps: tokens drafted a round; K when not given.
        runtime: "routed" runs each step's own layer over the whole window; "stock" repeats layer 0
            as an unpatched vLLM does.

    Returns:
        Overall metrics, with the same by category under "by_category".
    """
    steps = num_steps or head.num_layers
    head.eval()
    texts = list(zip(text.prompts, text.rows(), text.states, strict=True))
    counts: list[AcceptanceCounts] = []
    for prompt, tokens, states in track(texts, "replaying speculative decoding", unit="prompt"):
        first = len(prompt.token_ids) - 1
        drafts = draft_tokens(source, head, tokens, states, steps, runtime, first)
        counts.append(text.replay(len(counts), drafts))
    return summarise(text, counts, steps, runtime)


def summarise(
    text: Continuations,
    counts: Sequence[AcceptanceCounts],
    num_steps: int,
    runtime: Runtime | Literal["dspark"],
) -> dict[str, Any]:
    """The metrics of `measure` from the counters of each prompt.

    Raises:
        UserError: not one draft was made, so that every head would be as good.
    """
    total = AcceptanceCounts(num_steps)
    by_category: dict[str, AcceptanceCounts] = {}
    for prompt, counted in zip(text.prompts, counts, strict=True):
        total.merge(counted)
        by_category.setdefault(prompt.category, AcceptanceCounts(num_steps)).merge(counted)
    if not total.num_drafts:
        raise UserError(
            "a prompt that the base continues by more than one token",
            f"none of {len(text.prompts)}, with eval.num_tokens = {text.num_tokens}",
            "raise eval.num_tokens, or hold out other conversations",
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "num_prompts": len(text.prompts),
        "num_tokens": text.num_tokens,
        "runtime": runtime,
        **total.as_dict(),
        "by_category": {name: counts.as_dict() for name, counts in sorted(by_category.items())},
    }


def evaluate(
    base: Path,
    head_folder: Path,
    data: Path,
    recipe: EvalRecipe,
    *,
    runtime: Runtime | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """`mtp eval`: acceptance of a head folder on held-out prompts.

    Args:
        runtime: which vLLM is predicted; None takes the one that the head was trained for.

    Raises:
        UserError: a broken folder, or a head that was trained on another base.
    """
    source = open_head(head_folder, Checkpoint(base))
    require_tokenizer_of(data, base)
    teacher = Teacher.load(base, device=device)
    head = load_head(head_folder).to(teacher.device)
    prompts = evaluation_prompts(
        data, num_prompts=recipe.num_prompts, max_prompt_tokens=recipe.max_prompt_tokens
    )
    num_steps, own_runtime = trained_for(source.metadata["provenance"], source.num_layers)
    text = continue_prompts(teacher, prompts, recipe.num_tokens, num_steps)
    return measure(teacher, head, text, num_steps=num_steps, runtime=runtime or own_runtime)
