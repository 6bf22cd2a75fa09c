"""tau2-bench's results: one object a file, with the policy and all simulations of a domain.

The user is simulated too and may have tools of its own. Its calls and their results are between it
and the environment: the agent never saw them, so they are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtp.data.conversation import Conversation, RowError
from mtp.data.formats.fields import list_of, object_of
from mtp.data.formats.turns import as_conversation


def is_results(value: Any) -> bool:
    """An object with `simulations` that have `messages`, beside `tasks` or `info`."""
    simulations = value.get("simulations") if isinstance(value, dict) else None
    return (
        isinstance(simulations, list)
        and bool(simulations)
        and isinstance(simulations[0], dict)
        and "messages" in simulations[0]
        and ("tasks" in value or "info" in value)
    )


def read_parts(
    rows: list[tuple[int, Any]],
) -> Iterator[tuple[list[int], Conversation | RowError]]:
    """Read every simulation of a file's results."""
    for number, value in rows:
        if not is_results(value):
            yield [number], RowError("not results of tau2-bench")
            continue
        for simulation in value["simulations"]:
            try:
                yield [number], _conversation(object_of(simulation, "a simulation"), value)
            except RowError as error:
                yield [number], error


def _conversation(simulation: dict[str, Any], results: dict[str, Any]) -> Conversation:
    info = object_of(results.get("info"), "info")
    environment = object_of(info.get("environment_info"), "environment_info")
    agent = object_of(info.get("agent_info"), "agent_info")
    turns = [turn for turn in list_of(simulation.get("messages"), "messages") if _is_seen(turn)]
    turns = [
        {**turn, "tool_call_id": turn.get("id")}
        if isinstance(turn, dict) and turn.get("role") == "tool"
        else turn
        for turn in turns
    ]
    row = {**simulation, "system": environment.get("policy")}
    return as_conversation(row, turns, category="agent", teacher=str(agent.get("llm") or ""))


def _is_seen(turn: Any) -> bool:
    """Whether the agent got to see a message."""
    if not isinstance(turn, dict):
        return True  # to be refused
    return turn.get("requestor") != "user" and not (
        turn.get("role") == "user" and turn.get("tool_calls")
    )
