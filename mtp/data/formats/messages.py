"""Rows that hold a list of turns under one of the usual keys: most of what people publish.

The spellings differ by data set (`messages` of OpenAI's API, `conversations` of ShareGPT,
swift's call turns, Hermes' tags, everything as JSON text); the turns are read in one way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtp.data.conversation import Conversation, RowError
from mtp.data.formats.fields import from_json, split_reasoning, text_of
from mtp.data.formats.tagged import (
    is_response,
    opens_call,
    split_calls,
    split_responses,
    split_tools,
)
from mtp.data.formats.turns import (
    ROLE_KEYS,
    ROLE_NAMES,
    TEXT_KEYS,
    TOOL_KEYS,
    as_conversation,
    is_turn_list,
)

CONTAINERS = ("messages", "conversations", "conversation", "trajectory", "traj")
CALL_ROLES = ("tool_call", "tool_response")
# Kimi's own wire format, which Toucan kept in its system messages; the tools stand elsewhere.
_KIMI_TOOLS, _KIMI_END = "<|im_system|>tool_declare<|im_middle|>", "<|im_end|>"


def container(row: Any) -> str | None:
    """The key under which a row keeps its turns."""
    if not isinstance(row, dict):
        return None
    return next((key for key in CONTAINERS if is_turn_list(row.get(key))), None)


def is_messages(row: Any) -> bool:
    """An object with `messages` whose turns have a `role`."""
    return container(row) == "messages"


def is_sharegpt(row: Any) -> bool:
    """An object with `conversations` (or `conversation`)."""
    return container(row) in ("conversations", "conversation")


def is_trajectory(row: Any) -> bool:
    """An object with a `trajectory` that is a list of turns."""
    return container(row) == "trajectory"


def is_tau(row: Any) -> bool:
    """A run of tau-bench: an object with a `traj` that is a list of turns."""
    return container(row) == "traj"


def is_swift(row: Any) -> bool:
    """`messages` in which calls and results are turns of their own."""
    return is_messages(row) and any(
        isinstance(turn, dict) and turn.get("role") in CALL_ROLES for turn in row["messages"]
    )


def is_tagged(row: Any) -> bool:
    """Turns in which calls or schemas stand as tags in the text, and in no field."""
    key = container(row)
    if key is None:
        return False
    turns = [turn for turn in row[key] if isinstance(turn, dict)]
    if any(turn.get("tool_calls") for turn in turns):
        return False
    return any(
        opens_call(_text(turn)) if _role(turn) == "assistant" else "<tools>" in _text(turn)
        for turn in turns
        if _role(turn) in ("assistant", "system")
    )


def is_json_text(row: Any) -> bool:
    """`messages` is the JSON text of a list."""
    text = row.get("messages") if isinstance(row, dict) else None
    return isinstance(text, str) and text.lstrip().startswith("[")


def read(row: dict[str, Any]) -> Conversation:
    """Read the turns under the row's own key."""
    key = container(row)
    if key is None:
        raise RowError(f"no list of turns under any of {', '.join(CONTAINERS)}")
    return as_conversation(row, row[key])


def read_agent(row: dict[str, Any]) -> Conversation:
    """Read the turns of an agent's run, whether or not it used a tool."""
    return replace(read(row), category="agent")


def read_parts(rows: list[Any]) -> Conversation:
    """Read a file that is one conversation, a turn an item."""
    return as_conversation({}, rows)


def read_json_text(row: dict[str, Any]) -> Conversation:
    """Read `messages` and tools that are JSON texts (Toucan, CoderForge, SWE-smith)."""
    turns = from_json(row["messages"], "messages")
    if not is_turn_list(turns):
        raise RowError("messages: JSON, but not a list of turns")
    unpacked = {**row, "messages": turns}
    declared = None
    if _text(turns[0]).startswith(_KIMI_TOOLS):
        declared = _text(turns[0]).removeprefix(_KIMI_TOOLS).removesuffix(_KIMI_END)
        unpacked["messages"] = turns[1:]
    if is_tagged(unpacked):
        return read_tagged(unpacked)
    has_tools = any(row.get(key) for key in TOOL_KEYS)
    return as_conversation(row, unpacked["messages"], tools=None if has_tools else declared)


def read_tagged(row: dict[str, Any]) -> Conversation:
    """Read turns whose tags become calls, results and schemas (Hermes, Qwen as text)."""
    key = container(row)
    assert key is not None
    turns: list[dict[str, Any]] = []
    schemas: list[Any] = []
    for index, turn in enumerate(row[key]):
        try:
            found, more = _untagged(turn) if isinstance(turn, dict) else ([turn], [])
        except RowError as error:
            raise RowError(f"message {index}: {error}") from error
        turns += found
        schemas += more
    return as_conversation(row, turns, tools=schemas or None)


def _untagged(turn: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """(the turns that a tagged one stands for, the schemas in it)."""
    role, text = _role(turn), _text(turn)
    plain = {key: value for key, value in turn.items() if key not in (*ROLE_KEYS, *TEXT_KEYS)}
    if role == "assistant" and opens_call(text):
        reasoning, spoken = split_reasoning(text)
        content, calls = split_calls(spoken)
        filled = {"content": content, "tool_calls": [{"function": call} for call in calls]}
        if reasoning:
            filled["reasoning_content"] = reasoning
        return [{**plain, "role": role, **filled}], []
    if role == "tool" or (role == "user" and is_response(text)):
        responses = split_responses(text)
        return [{"role": "tool", "name": name, "content": body} for name, body in responses], []
    if role == "system" and "<tools>" in text:
        content, schemas = split_tools(text)
        return ([{"role": role, "content": content}] if content else []), schemas
    return [turn], []


def _role(turn: dict[str, Any]) -> str | None:
    return next((ROLE_NAMES.get(str(turn[key])) for key in ROLE_KEYS if turn.get(key)), None)


def _text(turn: dict[str, Any]) -> str:
    """A turn's text for a look at its tags; "" where reading it will be refused anyway."""
    try:
        return text_of(next((turn[key] for key in TEXT_KEYS if turn.get(key)), None))
    except RowError:
        return ""
