"""Recipes as text: overridden on the command line, and written out beside a run."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from typing import Any

from graft.errors import UsageError, UserError


def override(values: dict[str, Any], assignment: str) -> None:
    """Set one key of a recipe's tables, in place.

    Args:
        values: as read from TOML.
        assignment: "table.key=value"; the value as in TOML, where quotes of a word may be left out.

    Raises:
        UserError: no assignment, or a key inside something that is no table.
    """
    path, equals, text = assignment.partition("=")
    *tables, key = path.strip().split(".")
    if not equals or not tables or not all((*tables, key)):
        raise UsageError("--set TABLE.KEY=VALUE", repr(assignment), "write it in this form")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise UserError(f"a table {table}", f"a value, in --set {assignment}", "correct it")
    try:
        values[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        values[key] = text.strip()


def dump_recipe(recipe: Any) -> str:
    """A recipe as TOML with every key, which reads back as the same recipe."""
    lines: list[str] = []
    for table in dataclasses.fields(recipe):
        lines.append(f"[{table.name}]")
        for name, value in dataclasses.asdict(getattr(recipe, table.name)).items():
            lines.append(f"{name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # Not as \\u escapes: TOML has no surrogate pairs. The one other difference is DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
