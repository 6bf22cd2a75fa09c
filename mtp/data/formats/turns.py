"""A list of turns, in any of the usual spellings, as messages.

Every other reader first turns its rows into OpenAI-like dicts and ends here, so that roles,
arguments, parallel calls and thinking are judged in one place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtp.data.conversation import (
    CATEGORIES,
    Conversation,
    Message,
    RowError,
    ToolCall,
    infer_category,
)
from mtp.data.formats.blocks import has_blocks, unfolded
from mtp.data.formats.fields import (
    arguments_text,
    from_json,
    from_json_or_python,
    row_id,
    row_licence,
    row_teacher,
    split_reasoning,
    text_of,
    tools_texts,
)

CALL = "call"  # a turn that is a call of the assistant, its text the call's JSON
# A role that is not here is refused: mapping it to assistant would train on tool results.
ROLE_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
    "function_call": CALL,
    "tool_call": CALL,
}
ROLE_KEYS, TEXT_KEYS = ("role", "from"), ("content", "value", "text")
TOOL_KEYS = ("tools", "available_tools", "functions")
SYSTEM_KEYS = ("system", "system_prompt")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Marks by which sources say that an assistant turn is context: (key, value).
_CONTEXT_MARKS = (
    ("weight", 0),
    ("loss", False),
    ("train", False),
    ("is_demo", True),
    ("is_copied_context", True),
)


def is_turn(value: Any) -> bool:
    """An object with a role under one of its usual keys."""
    return isinstance(value, dict) and any(isinstance(value.get(key), str) for key in ROLE_KEYS)


def is_turn_list(value: Any) -> bool:
    """A list that starts with a turn; what follows is judged when it is read."""
    return isinstance(value, list) and bool(value) and is_turn(value[0])


def as_conversation(
    row: dict[str, Any], turns: list[Any], *, tools: Any = None, **changes: Any
) -> Conversation:
    """The conversation of a row whose turns were found.

    Args:
        row: where id, licence, teacher, category, tools and a system text may stand.
        turns: the dicts to read as messages.
        tools: schemas from elsewhere than the row's usual keys.
        changes: fields of the conversation that the format knows better.

    Raises:
        RowError: see `read_turns` and `tools_texts`.
    """
    messages = _with_own_tokens(read_turns(turns), row)
    system = next((row[key] for key in SYSTEM_KEYS if row.get(key)), None)
    if system and not any(message.role == "system" for message in messages):
        messages = (Message(role="system", content=text_of(system)), *messages)
    if tools is None:
        tools = next((row[key] for key in TOOL_KEYS if row.get(key)), None)
    schemas = tools_texts(tools)
    category = row.get("category")
    fields = {
        "id": row_id(row),
        "licence": row_licence(row),
        "teacher": row_teacher(row),
        "category": category if category in CATEGORIES else infer_category(messages, schemas),
        **changes,
    }
    return Conversation(messages=messages, tools=schemas, **fields)


def _with_own_tokens(messages: tuple[Message, ...], row: dict[str, Any]) -> tuple[Message, ...]:
    """The messages with the tokens that `mtp data regenerate` got for them, if it wrote the row."""
    record = row.get("regenerated")
    turns = record.get("turns") if isinstance(record, dict) else None
    replies = [place for place, message in enumerate(messages) if message.supervised]
    if not isinstance(turns, list) or len(turns) != len(replies):
        return messages
    changed = list(messages)
    for place, turn in zip(replies, turns, strict=True):
        ids = turn.get("token_ids") if isinstance(turn, dict) else None
        if isinstance(ids, list) and all(type(token) is int for token in ids):
            changed[place] = replace(changed[place], token_ids=tuple(ids))
    return tuple(changed)


def read_turns(values: list[Any]) -> tuple[Message, ...]:
    """Messages in order. Calls that directly follow an assistant turn belong to it.

    Raises:
        RowError: an unknown role, content that is not text, or broken calls; names the turn.
    """
    messages: list[Message] = []
    for index, value in enumerate(values):
        try:
            for turn in unfolded(value) if has_blocks(value) else [value]:
                _append(messages, _message(turn))
        except RowError as error:
            raise RowError(f"message {index}: {error}") from error
    return tuple(messages)


def _append(messages: list[Message], message: Message) -> None:
    last = messages[-1] if messages else None
    if (
        last
        and last.role == message.role == "assistant"
        and last.supervised == message.supervised
        and message.tool_calls
        and not (message.content or message.reasoning)
    ):
        messages[-1] = replace(last, tool_calls=last.tool_calls + message.tool_calls)
    else:
        messages.append(message)


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"a JSON {type(value).__name__}, not an object")
    name = next((value[key] for key in ROLE_KEYS if value.get(key) is not None), None)
    role = ROLE_NAMES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"unknown role {name!r}")
    content = text_of(next((value[k] for k in TEXT_KEYS if value.get(k) is not None), None))
    if role == CALL:
        role, content, calls = "assistant", "", _read_calls(_parsed_calls(content))
    else:
        calls = _read_calls(_calls_of(value))
    if calls and role != "assistant":
        raise RowError(f"tool calls in a {role} message")
    message = Message(
        role=role,
        content=content,
        tool_calls=calls,
        tool_call_id=_tool_call_id(value) if role == "tool" else "",
        name=str(value.get("name") or ""),
        supervised=role == "assistant" and not _is_context(value),
    )
    if role != "assistant":
        return message
    reasoning = next((value[key] for key in REASONING_KEYS if value.get(key)), None)
    if reasoning is not None:
        return replace(message, reasoning=text_of(reasoning))
    has_field = any(isinstance(value.get(key), str) for key in REASONING_KEYS)
    inline, content = split_reasoning(content, may_start_inside=not has_field)
    return replace(message, reasoning=inline, content=content)


def _is_context(value: dict[str, Any]) -> bool:
    return any(
        value.get(key) == mark and value.get(key) is not None for key, mark in _CONTEXT_MARKS
    )


def _tool_call_id(value: dict[str, Any]) -> str:
    """The id of the call that a result answers; SWE-agent writes a list of one."""
    ids = value.get("tool_call_ids")
    if isinstance(ids, list) and len(ids) == 1:
        return str(ids[0])
    return str(value.get("tool_call_id") or "")


def _calls_of(value: dict[str, Any]) -> list[Any]:
    """Calls in order, parallel ones included; also OpenAI's older single `function_call`."""
    calls = value.get("tool_calls") or []
    if isinstance(calls, str):
        calls = from_json(calls, "tool_calls") or []
    if not calls and value.get("function_call"):
        calls = [{"function": value["function_call"]}]
    if not isinstance(calls, list):
        raise RowError(f"tool_calls are a JSON {type(calls).__name__}, not a list")
    return calls


def _parsed_calls(text: str) -> list[Any]:
    value = from_json_or_python(text, "a call turn")
    return value if isinstance(value, list) else [value]


def _read_calls(calls: list[Any]) -> tuple[ToolCall, ...]:
    read_calls = []
    for call in calls:
        call = from_json(call, "a tool call") if isinstance(call, str) else call
        call = call if isinstance(call, dict) else {}
        function = call.get("function", call)
        function = function if isinstance(function, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise RowError("a tool call without a function name")
        arguments = arguments_text(function.get("arguments"))
        read_calls.append(ToolCall(name=name, arguments=arguments, id=str(call.get("id") or "")))
    return tuple(read_calls)
