"""Parts that several formats share: content, tool arguments, tool schemas, reasoning, ids."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from mtp.data.conversation import UNKNOWN_LICENCE, Message, RowError

ID_KEYS = ("id", "conversation_id", "trace_id", "instance_id", "session_id", "uuid")
OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


def text_of(content: Any) -> str:
    """The text of a message's content: a string, nothing, or a list of text parts.

    Raises:
        RowError: any other type, or a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"content is a JSON {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise RowError(f"content part of type {kind!r}, only text can be used")
        texts.append(text)
    return "".join(texts)


def arguments_text(arguments: Any) -> str:
    """Tool arguments as the text of a JSON object; `None`, missing and "" mean no arguments.

    Null values are removed from an object (Arrow pads with them) but kept in a JSON text, which
    is as the model wrote it.

    Raises:
        RowError: broken JSON, or JSON that is not an object.
    """
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, dict):
        return json.dumps(without_nulls(arguments), ensure_ascii=False)
    if not isinstance(arguments, str):
        raise RowError(f"tool arguments are a JSON {type(arguments).__name__}, not an object")
    parsed = _json(arguments, "tool arguments")
    if not isinstance(parsed, dict):
        raise RowError("tool arguments are JSON but not an object")
    return json.dumps(parsed, ensure_ascii=False)


def tools_texts(tools: Any) -> tuple[str, ...]:
    """Tool schemas, one JSON text each, from a list, a list of JSON texts, or one JSON text.

    Raises:
        RowError: broken JSON, or something that is not a list of objects.
    """
    if tools is None or tools == "":
        return ()
    if isinstance(tools, str):
        tools = _json(tools, "tools")
    if not isinstance(tools, list):
        raise RowError(f"tools are a JSON {type(tools).__name__}, not a list")
    texts = []
    for tool in tools:
        schema = _json(tool, "a tool") if isinstance(tool, str) else without_nulls(tool)
        if not isinstance(schema, dict):
            raise RowError("a tool's schema is not a JSON object")
        texts.append(json.dumps(schema, ensure_ascii=False))
    return tuple(texts)


def split_reasoning(content: str) -> tuple[str, str]:
    """(reasoning, content) of a reply that carries its thinking inline.

    A reply that starts in the middle of a block (the prompt held the opening tag) is split at
    the closing tag, as Qwen's templates do. Tags further in are text.

    Raises:
        RowError: an opening tag at the start that is never closed.
    """
    opened = content.lstrip().startswith(OPEN_TAG)
    before, close, after = content.partition(CLOSE_TAG)
    if opened and not close:
        raise RowError("a <think> block that is never closed")
    if not close or (not opened and OPEN_TAG in before):
        return "", content
    reasoning = before.lstrip().removeprefix(OPEN_TAG) if opened else before
    return reasoning.strip("\n"), after.lstrip("\n")


def row_id(row: dict[str, Any]) -> str:
    """The row's own id, or "" when it has none."""
    for key in ID_KEYS:
        if isinstance(row.get(key), str | int) and str(row[key]):
            return str(row[key])
    return ""


def row_licence(row: dict[str, Any]) -> str:
    """The licence that the row states."""
    value = row.get("licence") or row.get("license")
    return value if isinstance(value, str) else UNKNOWN_LICENCE


def without_nulls(value: Any) -> Any:
    """A copy without the keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def with_reasoning(message: Message, reasoning: Any) -> Message:
    """The message with its reasoning from the source's field, else from its own content.

    Raises:
        RowError: the field is not text, or the inline block is not well formed.
    """
    if reasoning:
        return replace(message, reasoning=text_of(reasoning))
    inline, content = split_reasoning(message.content)
    return replace(message, reasoning=inline, content=content)


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what}: broken JSON") from error
