"""The Agent Data Protocol's trajectories, and ATIF (Harbor's interchange format).

Both describe actions and observations of any agent; a result belongs to the call before it. ADP
separates code from the call that ran it; its text is written out as a fenced block.
"""

from __future__ import annotations

import re
from typing import Any

from mtp.data.conversation import Conversation, RowError
from mtp.data.formats.fields import list_of, object_of
from mtp.data.formats.turns import as_conversation

_FINISH = re.compile(r"\s*<finish>\s*(.*?)\s*</finish>\s*", re.DOTALL)
_STEP_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def is_adp(row: Any) -> bool:
    """`content` is a list of items that name their `class_`."""
    content = row.get("content") if isinstance(row, dict) else None
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(item, dict) and "class_" in item for item in content)
    )


def read_adp(row: dict[str, Any]) -> Conversation:
    """Read an ADP trajectory (`full_std`)."""
    if not is_adp(row):
        raise RowError("content is not a list of items with a class_")
    turns: list[dict[str, Any]] = []
    for index, item in enumerate(row["content"]):
        try:
            turns.append(_adp_turn(item, turns[-1] if turns else {}))
        except RowError as error:
            raise RowError(f"item {index}: {error}") from error
    return as_conversation({**row, "content": None}, turns, category="agent")


def is_atif(row: Any) -> bool:
    """`schema_version` names ATIF, and there are `steps`."""
    return (
        isinstance(row, dict)
        and str(row.get("schema_version", "")).startswith("ATIF")
        and isinstance(row.get("steps"), list)
    )


def read_atif(row: dict[str, Any]) -> Conversation:
    """Read an ATIF trajectory; those of its subagents are not in it."""
    agent = object_of(row.get("agent"), "agent")
    turns: list[dict[str, Any]] = []
    for index, step in enumerate(list_of(row.get("steps"), "steps")):
        try:
            turns += _atif_turns(step)
        except RowError as error:
            raise RowError(f"step {index}: {error}") from error
    teacher = str(agent.get("model_name") or "")
    tools = agent.get("tool_definitions") or []
    return as_conversation(row, turns, tools=tools, category="agent", teacher=teacher)


def _atif_turns(step: Any) -> list[dict[str, Any]]:
    """What is said in a step, and what its calls gave."""
    role = _STEP_ROLES.get(str(step.get("source"))) if isinstance(step, dict) else None
    if role is None:
        raise RowError("unknown source")
    calls = []
    for value in list_of(step.get("tool_calls"), "tool_calls"):
        call = object_of(value, "a tool call")
        function = {"name": call.get("function_name"), "arguments": call.get("arguments")}
        calls.append({"id": call.get("tool_call_id"), "function": function})
    turn = {key: step.get(key) for key in ("reasoning_content", "is_copied_context")}
    turns = [{**turn, "role": role, "content": step.get("message"), "tool_calls": calls}]
    observation = object_of(step.get("observation"), "observation")
    for value in list_of(observation.get("results"), "results"):
        result = object_of(value, "a result")
        fields = {"content": result.get("content")}
        if calls:
            fields["tool_call_id"] = result.get("source_call_id")
        turns.append({"role": "tool" if calls else "user", **fields})
    return turns


def _adp_turn(item: dict[str, Any], previous: dict[str, Any]) -> dict[str, Any]:
    kind, said = item["class_"], item.get("description") or ""
    spoken = {"role": "assistant", "reasoning_content": item.get("reasoning_content")}
    if kind == "message_action":
        content = item.get("content")
        finish = _FINISH.fullmatch(content) if isinstance(content, str) else None
        return {**spoken, "content": finish[1] if finish else content}
    if kind == "api_action":
        function = {"name": item.get("function"), "arguments": item.get("kwargs")}
        call = {"id": item.get("tool_call_id"), "function": function}
        return {**spoken, "content": said, "tool_calls": [call]}
    if kind == "code_action":
        block = f"```{item.get('language') or ''}\n{item.get('content') or ''}\n```"
        return {**spoken, "content": f"{said}\n\n{block}" if said else block}
    if kind == "text_observation":
        return _adp_observation(item, previous, item.get("content"))
    if kind == "web_observation":
        text = item.get("axtree") or item.get("html")
        if not text:
            raise RowError("a web_observation without text")
        return _adp_observation(item, previous, text)
    raise RowError(f"unknown class_ {kind!r}")


def _adp_observation(
    item: dict[str, Any], previous: dict[str, Any], content: Any
) -> dict[str, Any]:
    origin = item.get("source", "environment")
    if origin not in ("user", "environment"):
        raise RowError(f"a {item['class_']} from {origin!r}")
    answers = previous.get("tool_calls") or previous.get("role") == "tool"
    if origin == "environment" and answers:
        return {"role": "tool", "content": content, "tool_call_id": item.get("tool_call_id")}
    return {"role": "user", "content": content}
