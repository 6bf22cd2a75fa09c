"""Code sets that are no pairs: many answers with their pass rate, solutions, one file a row."""

from __future__ import annotations

from typing import Any

from mtp.data.conversation import Conversation, Document, RowError
from mtp.data.formats.fields import row_id, row_licence
from mtp.data.formats.turns import as_conversation, is_turn_list

_TEXT_KEYS = ("content", "code")
# `content` alone is no sign of code; one of these beside it is.
_FILE_KEYS = (
    "lang", "language", "ext", "path", "file_path", "file_name", "max_stars_repo_path", "repo_name",
    "repository_name", "blob_id",
)  # fmt: skip


def is_acecode(row: Any) -> bool:
    """`question` and a list of `inferences` with their `completion`."""
    inferences = row.get("inferences") if isinstance(row, dict) else None
    return (
        isinstance(inferences, list)
        and all(isinstance(item, dict) and "completion" in item for item in inferences)
        and ("question" in row or "context_messages" in row)
    )


def read_acecode(row: dict[str, Any]) -> Conversation:
    """Read the completion that passes most tests, the first of equals.

    Raises:
        RowError: none passes any, or a pass rate is no number.
    """
    if not is_acecode(row):
        raise RowError("no question with a list of inferences")
    rated = [(_number(item.get("pass_rate")), item) for item in row["inferences"]]
    best = max(rated, key=lambda pair: pair[0])[1] if rated else None
    if best is None or _number(best["pass_rate"]) <= 0:
        raise RowError("no completion passes a test")
    context = row.get("context_messages")
    asked = {"role": "user", "content": row.get("question")}
    turns = list(context) if is_turn_list(context) and context else [asked]
    turns.append({"role": "assistant", "content": best["completion"]})
    teacher = str(best.get("model_name") or "")
    return as_conversation(row, turns, category="code", teacher=teacher)


def is_humaneval(row: Any) -> bool:
    """`prompt` and the `canonical_solution` that continues it."""
    return isinstance(row, dict) and all(
        isinstance(row.get(key), str) for key in ("prompt", "canonical_solution")
    )


def read_humaneval(row: dict[str, Any]) -> Document:
    """Read the prompt with its continuation as code; tests are never part of it."""
    if not is_humaneval(row):
        raise RowError("no prompt with a canonical_solution")
    text = row["prompt"] + row["canonical_solution"]
    return Document(text=text, id=row_id(row), licence=row_licence(row))


def is_file(row: Any) -> bool:
    """A source file: `content` or `code` beside its language, path or repository."""
    if not isinstance(row, dict) or not any(isinstance(row.get(k), str) for k in _TEXT_KEYS):
        return False
    return any(isinstance(row.get(key), str) for key in _FILE_KEYS) and "role" not in row


def read_file(row: dict[str, Any]) -> Document:
    """Read the file's text; `licenses`, a list in The Stack, counts when it names one."""
    key = next((key for key in _TEXT_KEYS if isinstance(row.get(key), str)), _TEXT_KEYS[0])
    return read_text(row, key)


def read_text(row: dict[str, Any], key: str) -> Document:
    """Read the text under a key as a document."""
    text = row.get(key)
    if not isinstance(text, str):
        raise RowError(f"no text under {key!r}")
    several = row.get("licenses") or row.get("max_stars_repo_licenses")
    licence = row_licence(row)
    if isinstance(several, list) and several and all(isinstance(item, str) for item in several):
        licence = " OR ".join(several)
    return Document(text=text, id=row_id(row), licence=licence)


def _number(value: Any) -> float:
    """A number, also when it was written as text.

    Raises:
        RowError: it is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RowError(f"pass_rate {value!r} is no number") from error
