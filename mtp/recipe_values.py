"""Values of a TOML file as the dataclasses of a recipe; what does not fit is refused by name.

`mtp.recipe` says which keys there are and what they mean; here is what a value may be at all.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import typing
from pathlib import Path
from typing import Any

from graft.errors import UserError

LARGEST = 2**53  # what JSON keeps of an integer, and beyond what any key can mean
# Numbers that must be above 0; the others must not be below it.
ABOVE_ZERO = {
    "num_layers", "num_hidden_layers", "hidden_size", "tokens_per_batch", "learning_rate",
    "position_decay", "max_gradient_norm", "num_prompts", "max_prompt_tokens", "num_tokens",
    "rows_per_step", "row_length", "full_attention_interval", "calibration_tokens", "temperature",
    "until", "probe_every", "favourites", "max_repeats", "keep_checkpoints", "block_size",
    "draft_vocab_size", "sliding_window", "markov_rank", "decay",
}  # fmt: skip


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a recipe file.

    Raises:
        UserError: no such file, or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            "a recipe file", f"{path}: {error.strerror}", "name one in recipes/"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError("a recipe in TOML", f"{path}: {error}", "correct that line") from error


def build(cls: type, values: dict[str, Any], where: str) -> Any:
    """A dataclass from a TOML table.

    Args:
        cls: the dataclass.
        values: the table.
        where: it stands, for messages.

    Raises:
        UserError: an unknown key, or a value that its field does not take.
    """
    types = typing.get_type_hints(cls)
    for name in values:
        if name not in types:
            raise UserError(
                _nearest(name, list(types), "key"), f"{name} in {where}", "correct the recipe"
            )
    return cls(**{name: _value(types[name], value, name, where) for name, value in values.items()})


def _nearest(name: str, known: list[str], kind: str) -> str:
    """What was expected: the known name that is most like `name`, or that has it as initials (lr),
    or all of them."""
    short = [item for item in known if name == "".join(part[:1] for part in item.split("_"))]
    close = difflib.get_close_matches(name, known, n=1) or short
    return f"{kind} {close[0]}" if close else f"a {kind} of {', '.join(known)}"


def _value(wanted: Any, value: Any, name: str, where: str) -> Any:
    """`value` as the type `wanted` that a field of a recipe has."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted):
        if not isinstance(value, dict):
            raise UserError(f"a table [{name}]", f"{value!r} in {where}", "correct the recipe")
        return build(typing.cast(type, wanted), value, f"{where} [{name}]")
    if origin is tuple:
        if not isinstance(value, list):
            raise UserError(f"{name} as a list", f"{value!r} in {where}", "correct the recipe")
        return tuple(_value(inner[0], item, name, where) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"a table [{name}]", f"{value!r} in {where}", "correct the recipe")
        return {
            key: _value(inner[1], item, key, f"{where} [{name}]") for key, item in value.items()
        }
    if origin is typing.Literal:
        if value not in inner:
            expected = _nearest(str(value), list(inner), name)
            raise UserError(expected, f"{value!r} in {where}", "correct the recipe")
        return value
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise UserError(
            f"{name} of type {wanted.__name__}", f"{value!r} in {where}", "correct the recipe"
        )
    if isinstance(value, int | float):
        _require_in_range(value, name, where)
    return value


def _require_in_range(value: float, name: str, where: str) -> None:
    low = value < 0 or (not value and name in ABOVE_ZERO)
    if low or math.isnan(value) or abs(value) > LARGEST:
        least = "above 0" if name in ABOVE_ZERO else "of 0 or more"
        raise UserError(
            f"{name} {least}" if low else f"{name}, a number {least} and at most {LARGEST}",
            f"{value!r} in {where}",
            "correct the recipe",
        )
