"""Rows by a field of theirs: `--where "resolved=1"`, `--where "average_test_score>=0.9"`.

Data sets mark success differently (`resolved` of -1, 0, 1; `reward` as a float; scores as text),
so nothing is filtered unless asked for, and what was asked for stands in data.json.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from graft.errors import UsageError, UserError
from mtp.data.conversation import RowError

_OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_CONDITION = re.compile(r"\s*([\w.\-]+)\s*(>=|<=|!=|>|<|=)\s*(.+?)\s*$")


class RowFilter:
    """A condition on one key (`a.b` is a key inside an object); rows without it are kept.

    Numbers are compared as numbers, also where the row has them as text.
    """

    def __init__(self, condition: str) -> None:
        match = _CONDITION.match(condition)
        if match is None:
            expected = "a condition such as reward>=1 or metadata.kind=agent"
            raise UsageError(expected, repr(condition), "fix --where")
        self._text = condition.strip()
        self._path = match.group(1).split(".")
        self._operator, self._wanted = match.group(2), match.group(3)
        self.num_applied = 0

    def __str__(self) -> str:
        return self._text

    def keeps(self, row: Any) -> bool:
        """Whether a row may stay.

        Raises:
            RowError: the field is no number, but must be compared with one.
        """
        for key in self._path:
            row = row.get(key) if isinstance(row, dict) else None
        if row is None:
            return True
        self.num_applied += 1
        wanted = _number(self._wanted)
        if wanted is None:
            if self._operator not in ("=", "!="):
                raise RowError(f"{self._text}: only numbers can be ordered")
            if isinstance(row, bool):  # as JSON spells it
                return _OPERATORS[self._operator](str(row).lower(), self._wanted.lower())
            return _OPERATORS[self._operator](str(row), self._wanted)
        found = _number(row)
        if found is None:
            raise RowError(f"{'.'.join(self._path)} {row!r} is no number")
        return _OPERATORS[self._operator](found, wanted)


def require_applied(filters: tuple[RowFilter, ...]) -> None:
    """Refuse conditions on fields that no row has.

    Raises:
        UserError: names the condition.
    """
    for row_filter in filters:
        if not row_filter.num_applied:
            raise UserError(
                "rows with the field of every --where",
                f"none for {row_filter}",
                "fix the key; a.b is key b inside object a",
            )


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
