"""Logs of chat requests with their response: proxies, tracing tools, the OpenHands SDK.

The last reply stands in the response, apart from the messages. Where a log also holds the reply
as it came from the model (`raw_response`), the messages beside it are what the model saw, calls
written as text included, and that pair is read.
"""

from __future__ import annotations

from typing import Any

from mtp.data.conversation import Conversation, RowError
from mtp.data.formats.fields import text_of
from mtp.data.formats.messages import container
from mtp.data.formats.turns import SYSTEM_KEYS, TOOL_KEYS, as_conversation

_REQUEST_KEYS = ("request", "body", "kwargs")
_END_OF_CALL = "</function>"


def matches(row: Any) -> bool:
    """Messages of a request, and a response with `choices` or with content blocks."""
    if not isinstance(row, dict):
        return False
    return _request(row) is not None and _reply(row.get("response")) is not None


def read(row: dict[str, Any]) -> Conversation:
    """Read the request's messages and the response's one reply."""
    request, reply = _request(row), _reply(row.get("raw_response") or row.get("response"))
    if request is None or reply is None:
        raise RowError("no messages with a response that holds a reply")
    turns = [*request["messages"], reply]
    fields = {key: request[key] for key in SYSTEM_KEYS if request.get(key)}
    as_text = row.get("raw_response") is not None and not reply.get("tool_calls")
    if as_text:
        turns[-1] = {**reply, "content": _closed(text_of(reply.get("content")))}
        # The schemas stand in the system text.
        return as_conversation({**row, **fields}, turns, tools=[])
    tools: Any = next((h[k] for h in (request, row) for k in TOOL_KEYS if h.get(k)), [])
    return as_conversation({**row, **fields}, turns, tools=tools)


def _request(row: dict[str, Any]) -> dict[str, Any] | None:
    for holder in (row, *(row.get(key) for key in _REQUEST_KEYS)):
        if container(holder) == "messages":
            return holder
    return None


def _reply(response: Any) -> dict[str, Any] | None:
    """The assistant's message in a response of OpenAI's or Anthropic's API."""
    if not isinstance(response, dict):
        return None
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        return message if isinstance(message, dict) and "role" in message else None
    if isinstance(response.get("content"), list) and response.get("role") == "assistant":
        return {"role": "assistant", "content": response["content"]}
    return None


def _closed(text: str) -> str:
    """The text with the end of its last call, which the request had as its stop string."""
    opened, closed = text.count("<function="), text.count(_END_OF_CALL)
    return text.rstrip() + "\n" + _END_OF_CALL if opened == closed + 1 else text
