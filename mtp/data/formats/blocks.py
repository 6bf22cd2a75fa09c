"""Anthropic's content blocks as OpenAI messages: `tool_use`, `tool_result`, `thinking`.

One user message may hold the results of several calls and a text; each becomes a turn of its
own, the results first, as they answer the turn before.
"""

from __future__ import annotations

from typing import Any

from mtp.data.conversation import RowError
from mtp.data.formats.fields import text_of

BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


def has_blocks(message: Any) -> bool:
    """Whether a message's content holds a block that OpenAI's form does not know."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in BLOCKS for part in content
    )


def unfolded(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that one message with blocks stands for.

    Redacted thinking is left out: its text is not in the log.

    Raises:
        RowError: a block of the other side (a user's `tool_use`, an assistant's `tool_result`).
    """
    assistant = message.get("role") == "assistant"
    calls, results, thoughts, rest = [], [], [], []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_result" and not assistant:
            results.append(_result(part))
        elif kind == "tool_use" and assistant:
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"id": part.get("id"), "function": function})
        elif kind == "thinking" and assistant:
            thoughts.append(text_of(part.get("thinking")))
        elif kind == "redacted_thinking" and assistant:
            pass
        elif kind in BLOCKS:
            raise RowError(f"a {kind} block in a {message.get('role')!r} message")
        else:
            rest.append(part)
    turn = {key: value for key, value in message.items() if key != "content"}
    if assistant:
        reasoning = "\n".join(thought for thought in thoughts if thought)
        return [{**turn, "content": rest, "tool_calls": calls, "reasoning_content": reasoning}]
    return [*results, {**turn, "content": rest}] if rest else results


def _result(part: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": part.get("tool_use_id"),
        "content": part.get("content"),
    }
