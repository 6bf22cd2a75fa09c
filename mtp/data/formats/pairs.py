"""A prompt and its reply under two keys: instruction sets, code sets, and any keys by `--map`.

Either side may be a text or a list of turns. xlam's rows are pairs too: the reply is a list of
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mtp.data.conversation import Conversation, Note, RowError
from mtp.data.formats.fields import from_json, list_of, text_of
from mtp.data.formats.turns import as_conversation, is_turn_list

# (prompt key, reply key); the first that fits wins, so that `question`/`solution` of a set that
# also has an `answer` (often a bare number) reads the solution.
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "chosen_response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("instruction", "completion"),
    ("problem", "solution"),
    ("question", "response"),
    ("question", "solution"),
    ("question", "answer"),
    ("query", "response"),
    ("query", "answer"),
    ("input", "output"),
    ("inputs", "targets"),
)
_JUDGED = ("prompt", "completion")
_BESIDE_INSTRUCTION = ("input", "context")  # Alpaca's and Dolly's
_CODE_SCORE = "average_test_score"


def is_xlam(row: Any) -> bool:
    """`query`, `tools` and `answers`, the latter a list of calls or its JSON text."""
    return isinstance(row, dict) and {"query", "tools", "answers"} <= set(row)


def read_xlam(row: dict[str, Any]) -> Conversation:
    """Read a query and the calls that answer it."""
    answers = row.get("answers")
    calls = from_json(answers, "answers") if isinstance(answers, str) else answers
    if not isinstance(row.get("query"), str) or not isinstance(calls, list) or not calls:
        raise RowError("no query, or no list of calls that answers it")
    reply = {"role": "assistant", "tool_calls": [{"function": call} for call in calls]}
    turns = [{"role": "user", "content": row["query"]}, reply]
    return as_conversation(row, turns)


def is_open_code(row: Any) -> bool:
    """OpenCodeInstruct: `input` and `output` with the score of its tests."""
    return isinstance(row, dict) and _CODE_SCORE in row and _fits(row, "input", "output")


def is_magicoder(row: Any) -> bool:
    """Magicoder: `problem` and `solution` with the language."""
    return isinstance(row, dict) and "lang" in row and _fits(row, "problem", "solution")


def is_pair(row: Any) -> bool:
    """A prompt and a reply under one of the usual pairs of keys."""
    return _keys(row) is not None


def read_pair(row: dict[str, Any]) -> Conversation | Note:
    """Read the pair; what stands beside an `instruction` is part of the request.

    TRL's sets of judged answers have the bad ones too, with a `label` of false.
    """
    keys = _keys(row)
    if keys is None:
        raise RowError(f"none of these pairs of keys: {', '.join('/'.join(p) for p in PAIRS)}")
    if keys == _JUDGED and row.get("label") is False:
        return Note(reason="a completion that is labelled as bad")
    return _read(row, *keys)


def read_code_pair(row: dict[str, Any]) -> Conversation:
    """Read the pair of a set of programming tasks."""
    keys = _keys(row)
    if keys is None:
        raise RowError("no problem with a solution")
    return _read(row, *keys, category="code")


def mapped_pair(mapping: Mapping[str, str]) -> tuple[Callable[[Any], bool], Callable[[Any], Any]]:
    """(matches, read) for the keys of `--map prompt=...,response=...`.

    Without a response key the rows are prompts only.
    """
    prompt, reply = mapping["prompt"], mapping.get("response")

    def matches(row: Any) -> bool:
        return isinstance(row, dict) and prompt in row and (reply is None or reply in row)

    def read(row: dict[str, Any]) -> Conversation:
        if reply is None:
            return as_conversation(row, _side(row[prompt], "user"))
        return _read(row, prompt, reply)

    return matches, read


def _keys(row: Any) -> tuple[str, str] | None:
    if not isinstance(row, dict):
        return None
    return next(((p, r) for p, r in PAIRS if _fits(row, p, r)), None)


def _fits(row: dict[str, Any], prompt: str, reply: str) -> bool:
    return all(isinstance(row.get(k), str) or is_turn_list(row.get(k)) for k in (prompt, reply))


def _read(row: dict[str, Any], prompt: str, reply: str, **changes: Any) -> Conversation:
    request = row[prompt]
    if prompt == "instruction" and isinstance(request, str):
        extras = (text_of(row.get(key)) for key in _BESIDE_INSTRUCTION)
        request = "\n\n".join([request, *filter(None, extras)])
    if isinstance(row[reply], str) and not row[reply].strip():
        raise RowError(f"an empty {reply}")
    turns = [*_earlier(row), *_side(request, "user"), *_side(row[reply], "assistant")]
    return as_conversation(row, turns, **changes)


def _earlier(row: dict[str, Any]) -> list[Any]:
    """The turns before: Alpaca's and swift's sets have a `history` of pairs."""
    turns = []
    for pair in list_of(row.get("history"), "history"):
        if not (isinstance(pair, list) and len(pair) == 2):
            raise RowError("history: not a list of pairs")
        turns += [*_side(pair[0], "user"), *_side(pair[1], "assistant")]
    return turns


def _side(value: Any, role: str) -> list[Any]:
    """One side of the pair as turns."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if is_turn_list(value):
        return value
    raise RowError(f"neither a text nor a list of turns, but a JSON {type(value).__name__}")
