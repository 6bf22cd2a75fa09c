"""Prompts without answers: for regeneration and evaluation, never supervised.

The turns of a row are requests to make one after another; the base answers in between.
"""

from __future__ import annotations

from typing import Any

from mtp.data.conversation import Conversation, RowError
from mtp.data.formats.turns import as_conversation, is_turn_list


def is_bfcl(row: Any) -> bool:
    """BFCL: `question` is a list of turns, each a list of messages, and schemas in `function`."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("question"), list)
        and bool(row["question"])
        and all(is_turn_list(turn) for turn in row["question"])
    )


def read_bfcl(row: dict[str, Any]) -> Conversation:
    """Read all requests of a row."""
    if not is_bfcl(row):
        raise RowError("question is not a list of lists of messages")
    turns = [message for turn in row["question"] for message in turn]
    return as_conversation(row, turns, tools=row.get("function") or [])


def is_spec_bench(row: Any) -> bool:
    """Spec-Bench and MT-bench: `turns` is a list of texts."""
    turns = row.get("turns") if isinstance(row, dict) else None
    return isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns)


def read_spec_bench(row: dict[str, Any]) -> Conversation:
    """Read all requests of a row; a `reference` is no answer to learn from."""
    if not is_spec_bench(row):
        raise RowError("turns are not a list of texts")
    return as_conversation(row, [{"role": "user", "content": turn} for turn in row["turns"]])


def is_prompt(row: Any) -> bool:
    """A `prompt` that is a text or a list of turns; answers would have matched before."""
    prompt = row.get("prompt") if isinstance(row, dict) else None
    return isinstance(prompt, str) or is_turn_list(prompt)


def read_prompt(row: dict[str, Any]) -> Conversation:
    """Read the prompt."""
    prompt = row.get("prompt")
    if not is_prompt(row):
        raise RowError("no prompt")
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return as_conversation(row, turns or [])
