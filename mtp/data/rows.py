"""JSON and JSON Lines files as (line number, value), where a broken row is a RowError value.

The suffix only hints: `.json` files often hold JSON Lines, and a `.jsonl` of one line is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtp.data.conversation import RowError
from mtp.data.formats.messages import is_list

_SPACE = re.compile(r"\s*")


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Each non-empty line; lines end at \\n only (U+2028 and the like are text in JSON)."""
    with file.open("rb") as stream:
        for line, raw in enumerate(stream, start=1):
            text = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
            if text.strip():
                yield line, _parsed(text)


def json_file(file: Path) -> Iterator[tuple[int, Any]]:
    """A list of rows, one row, one conversation as a bare list of messages, or JSON Lines."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        yield 1, RowError("not UTF-8")
        return
    if text.lstrip().startswith("["):
        rows = list(_list_items(text))
        values = [row for _, row in rows]
        yield from [(1, values)] if is_list(values) else rows
        return
    try:
        yield 1, json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from json_lines(file)
        else:
            yield error.lineno, RowError("broken JSON")
    except RecursionError:
        yield 1, RowError("JSON nested too deeply")


def _list_items(text: str) -> Iterator[tuple[int, Any]]:
    """Each item of a JSON list, up to the first that is broken."""
    decoder = json.JSONDecoder()
    position, line, counted = _after_space(text, text.index("[") + 1), 1, 0
    while text[position : position + 1] != "]":
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            yield line, RowError("broken JSON")
            return
        yield line, value
        position = _after_space(text, position)
        if text[position : position + 1] == ",":
            position = _after_space(text, position + 1)
        elif text[position : position + 1] != "]":
            yield line, RowError("broken JSON after this row")
            return


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return RowError("not UTF-8")
    except (ValueError, RecursionError):
        return RowError("broken JSON")
