"""Items of OpenAI's Responses API: NeMo Gym rollouts, and logs of requests with their output.

One assistant turn is spread over items (`reasoning`, `message`, `function_call`); the items from
one result or request to the next are one turn.
"""

from __future__ import annotations

from typing import Any

from mtp.data.conversation import Conversation, RowError
from mtp.data.formats.fields import list_of, object_of, text_of
from mtp.data.formats.turns import as_conversation

# Where requests stand in rows: NeMo Gym's key, a log's, or the row itself.
_REQUEST_KEYS = ("responses_create_params", "request", "body")


def matches(row: Any) -> bool:
    """A row, or a log's request, with `input`, and an `output` list of typed items."""
    if not isinstance(row, dict):
        return False
    output = _output(row)
    return (
        isinstance(output, list)
        and all(isinstance(item, dict) and "type" in item for item in output)
        and isinstance(_request(row).get("input"), list | str)
    )


def read(row: dict[str, Any]) -> Conversation:
    """Read the request's items and then the output's as one conversation."""
    request, output = _request(row), _output(row)
    if not isinstance(output, list) or not isinstance(request.get("input"), list | str):
        raise RowError("no input with a list of output items")
    prompt = request["input"]
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    turns = _turns([*items, *output])
    if request.get("instructions"):
        turns.insert(0, {"role": "system", "content": request["instructions"]})
    return as_conversation(row, turns, tools=request.get("tools") or [])


def _request(row: dict[str, Any]) -> dict[str, Any]:
    return next((row[key] for key in _REQUEST_KEYS if isinstance(row.get(key), dict)), row)


def _output(row: dict[str, Any]) -> Any:
    response = row.get("response")
    return (response if isinstance(response, dict) else row).get("output")


def _turns(items: list[Any]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    open_turn: dict[str, Any] | None = None  # the assistant turn that items are added to
    for index, item in enumerate(items):
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "message" and item.get("role") != "assistant":
            open_turn = None
            turns.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call_output":
            open_turn = None
            output = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
            turns.append({"role": "tool", **output})
        elif kind in ("message", "reasoning", "function_call"):
            if open_turn is None:
                open_turn = {"role": "assistant", "content": "", "tool_calls": []}
                turns.append(open_turn)
            _add(open_turn, kind, item)
        else:
            raise RowError(f"item {index} of type {kind!r}")
    return turns


def _add(turn: dict[str, Any], kind: str, item: dict[str, Any]) -> None:
    if kind == "message":
        turn["content"] += text_of(item.get("content"))
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn["tool_calls"].append({"id": item.get("call_id"), "function": function})
    else:
        # The raw thinking where it was returned; a summary is not what the model generated.
        parts = [object_of(part, "thinking") for part in list_of(item.get("content"), "thinking")]
        thoughts = text_of([part["text"] for part in parts if "text" in part])
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
