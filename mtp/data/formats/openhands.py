"""OpenHands event streams: the evaluation's `output.jsonl` and exported trajectories.

Events are what the runtime did. What the model said stands in `tool_call_metadata`, once on each
action of a reply and again on each observation, and is taken once, by the response's id. A reply
that was not recorded there is not reconstructed from the action: the row is refused.
"""

from __future__ import annotations

from typing import Any

from mtp.data.conversation import Conversation, RowError
from mtp.data.formats.fields import list_of, object_of
from mtp.data.formats.turns import as_conversation

# Events that the model neither wrote nor read.
_SILENT_ACTIONS = ("recall", "change_agent_state", "null", "condensation", "condensation_request")
_ROW_KEYS = ("instance_id", "licence", "license")
_SILENT_OBSERVATIONS = ("recall", "agent_state_changed", "null", "condense")


def is_event(value: Any) -> bool:
    """An object with a `source` and either an `action` or an `observation`."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("source"), str)
        and isinstance(value.get("action", value.get("observation")), str)
        and ("args" in value or "extras" in value or "content" in value)
    )


def matches(row: Any) -> bool:
    """A row whose `history` is a list of events, or such a list."""
    history = row.get("history") if isinstance(row, dict) else row
    return isinstance(history, list) and bool(history) and all(map(is_event, history))


def read(row: Any) -> Conversation:
    """Read one row of `output.jsonl`, or an exported list of events."""
    if isinstance(row, list):
        return read_parts(row)
    metadata = object_of(row.get("metadata"), "metadata")
    config = object_of(metadata.get("llm_config"), "llm_config")
    changes = {"teacher": str(config["model"])} if config.get("model") else {}
    return _read(row, row.get("history") or [], changes)


def read_parts(rows: list[Any]) -> Conversation:
    """Read a file that is a list of events."""
    return _read({}, rows, {})


def _read(row: dict[str, Any], events: list[Any], changes: dict[str, str]) -> Conversation:
    turns: list[dict[str, Any]] = []
    tools: list[Any] = []
    seen: set[str] = set()
    for index, event in enumerate(events):
        try:
            if not is_event(event):
                raise RowError("neither an action nor an observation")
            turn = _action(event, seen, tools) if "action" in event else _observation(event)
        except RowError as error:
            raise RowError(f"event {index}: {error}") from error
        if turn:
            turns.append(turn)
    # Rows repeat the first message as `instruction`; an id is all that is wanted from them.
    known = {key: row.get(key) for key in _ROW_KEYS}
    return as_conversation(known, turns, tools=tools, **{"category": "agent", **changes})


def _action(event: dict[str, Any], seen: set[str], tools: list[Any]) -> dict[str, Any] | None:
    action, arguments = event["action"], object_of(event.get("args"), "args")
    if action == "system":
        tools += list_of(arguments.get("tools"), "tools")
        return {"role": "system", "content": arguments.get("content")}
    if event["source"] == "user" and action == "message":
        if arguments.get("image_urls"):
            raise RowError("a message with images")
        return {"role": "user", "content": arguments.get("content")}
    if action in _SILENT_ACTIONS or event["source"] == "environment":
        return None
    metadata = object_of(event.get("tool_call_metadata"), "tool_call_metadata")
    if metadata:
        return _reply(metadata, seen)
    if event["source"] == "agent" and action == "message":
        return {"role": "assistant", "content": arguments.get("content")}
    raise RowError(f"action {action!r} of {event['source']!r} without the model's own reply")


def _reply(metadata: dict[str, Any], seen: set[str]) -> dict[str, Any] | None:
    response = object_of(metadata.get("model_response"), "model_response")
    choices = list_of(response.get("choices"), "choices")
    message = object_of(choices[0], "a choice").get("message") if choices else None
    if not isinstance(message, dict):
        raise RowError("tool_call_metadata without the model's message")
    identity = str(response.get("id") or metadata.get("tool_call_id"))
    if identity in seen:
        return None
    seen.add(identity)
    return {**message, "role": "assistant"}


def _observation(event: dict[str, Any]) -> dict[str, Any] | None:
    if event["observation"] in _SILENT_OBSERVATIONS:
        return None
    metadata = object_of(event.get("tool_call_metadata"), "tool_call_metadata")
    if metadata:
        turn = {"role": "tool", "content": event.get("content")}
        call = {"tool_call_id": metadata.get("tool_call_id"), "name": metadata.get("function_name")}
        return {**turn, **call}
    return {"role": "user", "content": event.get("content")}
