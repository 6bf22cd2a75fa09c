"""Claude Code session logs: one file, one content block a line, one or several conversations.

Lines form a tree by `parentUuid`: every root starts a conversation (the main one, each subagent's
sidechain, what follows a compaction). Of a tree with branches, the path to its last turn is
read, with the results and the parallel blocks that belong to the path's turns; retries that were
abandoned are counted, not read. Blocks of one reply share `message.id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtp.data.conversation import Conversation, Note, RowError
from mtp.data.formats.fields import list_of
from mtp.data.formats.turns import as_conversation

TURN_TYPES = ("user", "assistant")
_KEYS = ("sessionId", "uuid", "parentUuid", "type")


def is_line(value: Any) -> bool:
    """A line of the log that is a node of the tree."""
    return isinstance(value, dict) and all(key in value for key in _KEYS)


def is_note(value: Any) -> bool:
    """A line that Claude Code writes beside the tree (summaries, snapshots, queue)."""
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def read_parts(
    rows: list[tuple[int, Any]],
) -> Iterator[tuple[list[int], Conversation | RowError | Note]]:
    """Read the lines of one file.

    Args:
        rows: (line number, line).

    Yields:
        (the lines' numbers, the conversation that they make), (numbers, why they make none), or
        (numbers, a note on lines that are no turns).
    """
    trees: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    roots: dict[str, str] = {}
    for number, line in rows:
        if isinstance(line, RowError):
            yield [number], line
        elif is_line(line) and isinstance(line["uuid"], str):
            root = roots.get(str(line["parentUuid"]), line["uuid"])
            roots[line["uuid"]] = root
            trees.setdefault(root, []).append((number, line))
        elif is_note(line):
            yield [number], Note(reason="not a turn")
        else:
            yield [number], RowError("not a line of a Claude Code log")
    for tree in trees.values():
        yield from _read_tree(tree)


def _read_tree(
    tree: list[tuple[int, dict[str, Any]]],
) -> Iterator[tuple[list[int], Conversation | RowError | Note]]:
    turns = [(number, line) for number, line in tree if _is_turn(line)]
    silent = [number for number, line in tree if not _is_turn(line)]
    if silent:
        yield silent, Note(reason="not a turn")
    if not turns:
        return
    path = _path({line["uuid"]: line for _, line in tree}, turns)
    kept = [(number, line) for number, line in turns if line["uuid"] in path]
    abandoned = [number for number, line in turns if line["uuid"] not in path]
    if abandoned:
        yield abandoned, Note(reason="on an abandoned branch")
    numbers = [number for number, _ in kept]
    try:
        yield numbers, _conversation([line for _, line in kept])
    except RowError as error:
        yield numbers, error


def _is_turn(line: dict[str, Any]) -> bool:
    message = line.get("message")
    return (
        line["type"] in TURN_TYPES
        and isinstance(message, dict)
        and message.get("model") != "<synthetic>"
    )


def _reply_id(line: dict[str, Any]) -> str:
    """What the lines of one reply have in common, "" for a line that is none."""
    message = line.get("message")
    if line["type"] != "assistant" or not isinstance(message, dict):
        return ""
    return str(message.get("id") or "")


def _path(nodes: dict[str, dict[str, Any]], turns: list[tuple[int, dict[str, Any]]]) -> set[str]:
    """Ids of the turns on the way to the last one, with what belongs to the same replies."""
    path: set[str] = set()
    uuid: Any = turns[-1][1]["uuid"]
    while isinstance(uuid, str) and uuid in nodes and uuid not in path:
        path.add(uuid)
        uuid = nodes[uuid]["parentUuid"]
    # Parallel calls branch: each result hangs on its own call.
    replies = {_reply_id(nodes[uuid]) for uuid in path} - {""}
    calls: set[str] = set()
    for _, line in turns:
        message = line["message"]
        if _reply_id(line) in replies:
            path.add(line["uuid"])
        if line["uuid"] in path:
            calls |= {str(part.get("id")) for part in _blocks(message, "tool_use")}
        elif calls & {str(part.get("tool_use_id")) for part in _blocks(message, "tool_result")}:
            path.add(line["uuid"])
    return path


def _blocks(message: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, dict) and part.get("type") == kind]


def _conversation(lines: list[dict[str, Any]]) -> Conversation:
    turns: list[dict[str, Any]] = []
    replies: dict[str, dict[str, Any]] = {}
    teacher = ""
    for line in lines:
        message = line["message"]
        identity = _reply_id(line)
        if identity in replies:
            replies[identity]["content"] += _as_blocks(message.get("content"))
            continue
        # The line's type decides who speaks.
        turn = {"role": line["type"], "content": _as_blocks(message.get("content"))}
        turns.append(turn)
        if line["type"] == "assistant":
            teacher = str(message.get("model") or teacher)
            if identity:
                replies[identity] = turn
    first = lines[0]
    side = "-" + first["uuid"] if first.get("isSidechain") else ""
    changes = {"id": f"{first['sessionId']}{side}", "category": "agent", "teacher": teacher}
    return as_conversation({}, turns, **changes)


def _as_blocks(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [*list_of(content, "content")]
