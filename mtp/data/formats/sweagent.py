"""SWE-agent's `.traj` files and mini-swe-agent's trajectories.

A `.traj` holds the conversation in `history` and again, growing, in `trajectory`; the former is
read. Older agents write their command as a fenced block in the text and get results in user
turns; that is what the model saw, so it stays text.
"""

from __future__ import annotations

from typing import Any

from mtp.data.conversation import Conversation, RowError
from mtp.data.formats.turns import as_conversation, is_turn_list


def is_traj(row: Any) -> bool:
    """`history` is a list of turns, and `trajectory` the list of steps beside it."""
    return (
        isinstance(row, dict)
        and is_turn_list(row.get("history"))
        and isinstance(row.get("trajectory"), list)
    )


def read_traj(row: dict[str, Any]) -> Conversation:
    """Read the history; demonstrations are context."""
    history = row.get("history")
    if not is_turn_list(history):
        raise RowError("no history that is a list of turns")
    assert isinstance(history, list)
    return as_conversation(row, history, category="agent")


def is_mini(row: Any) -> bool:
    """`messages` beside `trajectory_format`, or beside an `info` that names the version."""
    if not isinstance(row, dict) or not is_turn_list(row.get("messages")):
        return False
    info = row.get("info")
    names_version = isinstance(info, dict) and "mini_version" in info
    return names_version or str(row.get("trajectory_format", "")).startswith("mini-swe-agent")


def read_mini(row: dict[str, Any]) -> Conversation:
    """Read the messages; the `exit` turn at the end is the harness', not the model's."""
    turns = [
        turn
        for turn in row["messages"]
        if not (isinstance(turn, dict) and turn.get("role") == "exit")
    ]
    return as_conversation(row, turns, category="agent")
