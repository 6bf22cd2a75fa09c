"""OpenAI chat messages: `{"messages": [...], "tools": [...]}`, or the bare list of messages."""

from __future__ import annotations

from typing import Any

from mtp.data.conversation import (
    CATEGORIES,
    UNKNOWN_LICENCE,
    Conversation,
    Message,
    RowError,
    ToolCall,
    infer_category,
)
from mtp.data.formats.fields import (
    arguments_text,
    row_id,
    row_licence,
    text_of,
    tools_texts,
    with_reasoning,
)

# A role that is not here is refused: mapping it to assistant would train on tool results.
ROLE_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def matches(row: Any) -> bool:
    """An object with a `messages` list."""
    return isinstance(row, dict) and isinstance(row.get("messages"), list)


def is_list(row: Any) -> bool:
    """A list of objects that all have a `role`."""
    return (
        isinstance(row, list)
        and bool(row)
        and all(isinstance(item, dict) and "role" in item for item in row)
    )


def read(row: dict[str, Any], source: str) -> Conversation:
    """Read a row; the category is the row's own when it names one of ours."""
    messages = _messages(row["messages"])
    tools = tools_texts(row.get("tools"))
    category = row.get("category")
    return Conversation(
        id=row_id(row),
        source=source,
        licence=row_licence(row),
        category=category if category in CATEGORIES else infer_category(messages, tools),
        messages=messages,
        tools=tools,
    )


def read_list(row: list[dict[str, Any]], source: str) -> Conversation:
    """Read a bare list of messages, which names no id, tools or licence."""
    messages = _messages(row)
    return Conversation(
        id="",
        source=source,
        licence=UNKNOWN_LICENCE,
        category=infer_category(messages, ()),
        messages=messages,
    )


def _messages(values: list[Any]) -> tuple[Message, ...]:
    messages = []
    for index, value in enumerate(values):
        try:
            messages.append(_message(value))
        except RowError as error:
            raise RowError(f"message {index}: {error}") from error
    return tuple(messages)


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"a JSON {type(value).__name__}, not an object")
    name = value.get("role")
    role = ROLE_NAMES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"unknown role {name!r}")
    calls = _tool_calls(value)
    if calls and role != "assistant":
        raise RowError(f"tool calls in a {role} message")
    message = Message(
        role=role,
        content=text_of(value.get("content")),
        tool_calls=calls,
        tool_call_id=str(value.get("tool_call_id") or ""),
        name=str(value.get("name") or ""),
        supervised=role == "assistant" and value.get("weight", 1) != 0,
    )
    if role != "assistant":
        return message
    return with_reasoning(message, value.get("reasoning_content") or value.get("reasoning"))


def _tool_calls(value: dict[str, Any]) -> tuple[ToolCall, ...]:
    """Calls in order, parallel ones included; also OpenAI's older single `function_call`."""
    calls = value.get("tool_calls") or []
    if not calls and value.get("function_call"):
        calls = [{"function": value["function_call"]}]
    if not isinstance(calls, list):
        raise RowError(f"tool_calls are a JSON {type(calls).__name__}, not a list")
    read_calls = []
    for call in calls:
        call = call if isinstance(call, dict) else {}
        function = call.get("function", call)
        function = function if isinstance(function, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise RowError("a tool call without a function name")
        arguments = arguments_text(function.get("arguments"))
        read_calls.append(ToolCall(name=name, arguments=arguments, id=str(call.get("id") or "")))
    return tuple(read_calls)
