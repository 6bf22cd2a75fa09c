"""The formats of rows, as a table: adding one is one small module and one line here.

A format says whether a row is of its shape by looking at the keys, and reads it into the
internal form. A row that no format claims is refused: nothing is ever guessed to be a reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtp.data.conversation import Conversation, RowError
from mtp.data.formats import messages


@dataclass(frozen=True, kw_only=True)
class Format:
    """`matches(row)` recognises the shape; `read(row, source)` may raise RowError."""

    name: str
    matches: Callable[[Any], bool]
    read: Callable[[Any, str], Conversation]


FORMATS: tuple[Format, ...] = (
    Format(name="openai-messages", matches=messages.matches, read=messages.read),
    Format(name="message-list", matches=messages.is_list, read=messages.read_list),
)


def read_row(row: Any, source: str) -> tuple[str, Conversation]:
    """The name of the format that claims the row, and the row in the internal form.

    Raises:
        RowError: no format claims it, or the one that does cannot read it.
    """
    for format_ in FORMATS:
        if format_.matches(row):
            return format_.name, format_.read(row, source)
    if isinstance(row, dict):
        keys = ", ".join(sorted(map(str, row))[:8])
        raise RowError(f"unknown shape, keys: {keys or 'none'}")
    raise RowError(f"unknown shape: a JSON {type(row).__name__}")
