"""Held-out prompts: where a served model would start to generate.

A conversation's prompt is a row up to the start of one of its replies, so it ends with the
generation prompt; a document's is its beginning. The choice is by hash: the same folder, count
and seed give the same prompts, whatever the order of the rows.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graft.errors import UserError
from mtp.data.store import load_prepared

MIN_CONTINUATION = 8  # a reply of fewer tokens ("yes") says nothing about later positions


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens to continue; `id` names the conversation and the token at which the prompt ends."""

    id: str
    category: str
    token_ids: tuple[int, ...]


def evaluation_prompts(
    folder: Path, *, num_prompts: int, max_prompt_tokens: int, seed: int = 0
) -> list[Prompt]:
    """Choose up to `num_prompts` held-out prompts, categories in turn, conversations in turn.

    Args:
        folder: a folder made by `prepare`.
        num_prompts: how many at most; fewer when the held-out data has fewer.
        max_prompt_tokens: longer prompts are left out.
        seed: changes the choice.

    Raises:
        UserError: no held-out row has a prompt that is short enough.
    """
    rows = load_prepared(folder)["held_out"]
    by_category: dict[str, dict[str, list[Prompt]]] = defaultdict(lambda: defaultdict(list))
    for row in rows.with_format("numpy") if len(rows) else []:
        for prompt in row_prompts(row, max_prompt_tokens):
            by_category[prompt.category][str(row["conversation_id"])].append(prompt)
    if not by_category:
        raise UserError(
            f"held-out prompts of at most {max_prompt_tokens} tokens",
            f"none among {len(rows)} held-out rows of {folder}",
            "prepare more data, or raise the held-out percentage or the prompt length",
        )
    queues = [_in_turn(by_category[name], seed) for name in sorted(by_category)]
    return _round_robin(queues)[:num_prompts]


def row_prompts(row: dict[str, Any], max_prompt_tokens: int) -> list[Prompt]:
    """All prompts of one row of a prepared folder, `input_ids` [T] and `loss_mask` [T]."""
    mask = np.asarray(row["loss_mask"], dtype=np.int8)
    if mask[0]:
        half = min(max_prompt_tokens, len(mask) // 2)
        ends = [half] if half >= MIN_CONTINUATION else []
    else:
        edges = np.flatnonzero(np.diff(mask)) + 1
        starts, stops = edges[::2], np.append(edges, len(mask))[1::2]
        ends = [int(a) for a, b in zip(starts, stops, strict=True) if b - a >= MIN_CONTINUATION]
    return [
        Prompt(
            id=f"{row['conversation_id']}@{end}",
            category=str(row["category"]),
            token_ids=tuple(int(token) for token in row["input_ids"][:end]),
        )
        for end in ends
        if 0 < end <= max_prompt_tokens
    ]


def _in_turn(conversations: dict[str, list[Prompt]], seed: int) -> list[Prompt]:
    """One prompt of each conversation, then a second one, and so on."""

    def key(text: str) -> str:
        return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()

    queues = [
        sorted(
            {prompt.token_ids: prompt for prompt in conversations[name]}.values(),
            key=lambda prompt: key(prompt.id),
        )
        for name in sorted(conversations, key=key)
    ]
    return _round_robin(queues)


def _round_robin(queues: list[list[Prompt]]) -> list[Prompt]:
    longest = max(map(len, queues))
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]
