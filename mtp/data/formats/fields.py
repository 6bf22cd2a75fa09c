"""Parts that several formats share: content, tool arguments, tool schemas, reasoning, ids."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from mtp.data.conversation import UNKNOWN_LICENCE, RowError

ID_KEYS = (
    "id",
    "conversation_id",
    "trace_id",
    "trajectory_id",
    "traj_id",
    "instance_id",
    "session_id",
    "uuid",
    "task_id",
    "question_id",
)
TEACHER_KEYS = ("teacher", "model", "model_name", "model_name_or_path", "generator")
_MAX_DEPTH, _TOO_DEEP = 100, "JSON nested too deeply"
TEXT_PARTS = ("text", "input_text", "output_text")
OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
_TAG = re.compile("</?think>")
_CODE = re.compile(r"^```.*?^```[ \t]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_QUOTES, _BRACKETS, _PUNCTUATION = "\"'`*_“”‘’«»", "([{", ".,;:!?)]}"


def text_of(content: Any) -> str:
    """The text of a message's content: a string, nothing, or a list of text parts.

    Raises:
        RowError: any other type, or a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"content is a JSON {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        kind = (part.get("type") or "text") if isinstance(part, dict) else "text"
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise RowError(f"content part of type {kind!r}, only text can be used")
        texts.append(text)
    return "".join(texts)


def object_of(value: Any, what: str) -> dict[str, Any]:
    """A JSON object, empty for nothing; `what` names it in the refusal.

    Raises:
        RowError: anything else.
    """
    if value and not isinstance(value, dict):
        raise RowError(f"{what}: a JSON {type(value).__name__}, not an object")
    return value or {}


def list_of(value: Any, what: str) -> list[Any]:
    """A JSON list, empty for nothing; `what` names it in the refusal.

    Raises:
        RowError: anything else.
    """
    if value and not isinstance(value, list):
        raise RowError(f"{what}: a JSON {type(value).__name__}, not a list")
    return value or []


def arguments_text(arguments: Any) -> str:
    """Tool arguments as the text of a JSON object; `None`, missing and "" mean no arguments.

    Null values are removed from an object (Arrow pads with them) but kept in a JSON text, which
    is as the model wrote it.

    Raises:
        RowError: broken JSON, or JSON that is not an object.
    """
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, dict):
        return to_json(without_nulls(arguments), "tool arguments")
    if not isinstance(arguments, str):
        raise RowError(f"tool arguments are a JSON {type(arguments).__name__}, not an object")
    parsed = from_json(arguments, "tool arguments")
    if not isinstance(parsed, dict):
        raise RowError("tool arguments are JSON but not an object")
    return to_json(parsed, "tool arguments")


def tools_texts(tools: Any) -> tuple[str, ...]:
    """Tool schemas, one JSON text each, from a list, a list of JSON texts, or one JSON text.

    Each becomes what a server puts into the template: `{"type": "function", "function": {...}}`,
    from the bare function, OpenAI's flat form, or Anthropic's with its `input_schema`.

    Raises:
        RowError: broken JSON, or something that is not a list of objects with a name.
    """
    if tools is None or tools == "":
        return ()
    if isinstance(tools, str):
        tools = from_json(tools, "tools")
    if not isinstance(tools, list):
        raise RowError(f"tools are a JSON {type(tools).__name__}, not a list")
    texts = []
    for tool in tools:
        schema = from_json(tool, "a tool") if isinstance(tool, str) else without_nulls(tool)
        texts.append(to_json(_wrapped(schema), "a tool"))
    return tuple(texts)


def split_reasoning(content: str, *, may_start_inside: bool = True) -> tuple[str, str]:
    """(reasoning, content) of a reply that carries its thinking inline.

    A reply that starts in the middle of a block (the prompt held the opening tag) is split at
    the closing tag, as Qwen's templates do, but not where that tag is only mentioned, see
    `_is_mention`. Tags further in are text.

    Args:
        content: the reply.
        may_start_inside: False where the source has the thinking elsewhere, if there is any.

    Raises:
        RowError: an opening tag at the start that is never closed.
    """
    if CLOSE_TAG not in content and OPEN_TAG not in content:
        return "", content
    opened = content.lstrip().startswith(OPEN_TAG)
    if opened and CLOSE_TAG not in content:
        raise RowError("a <think> block that is never closed")
    code = [match.span() for match in _CODE.finditer(content)]
    tags = [match for match in _TAG.finditer(content) if not _is_mention(match, code)]
    end = next((match.start() for match in tags if match[0] == CLOSE_TAG), -1)
    if opened and end < 0:
        end = content.index(CLOSE_TAG)  # opened it was, so one of them closes it
    if end < 0 or not (opened or may_start_inside):
        return "", content
    if not opened and any(match[0] == OPEN_TAG and match.start() < end for match in tags):
        return "", content
    before, after = content[:end], content[end + len(CLOSE_TAG) :]
    reasoning = before.lstrip().removeprefix(OPEN_TAG) if opened else before
    return reasoning.strip("\n"), after.lstrip("\n")


def _is_mention(tag: re.Match[str], code: list[tuple[int, int]]) -> bool:
    """Whether a tag is spoken of: in code, quoted, in brackets, before punctuation, after a space.

    A model that stops thinking writes the tag on a line of its own, or right behind a word. At the
    very start, where there is no thinking to end, words after a space make it a mention too.
    """
    text, start, end = tag.string, tag.start(), tag.end()
    if any(first <= start < last for first, last in code):
        return True
    before = text[text.rfind("\n", 0, start) + 1 : start]
    after = text[end:].partition("\n")[0]
    left, right = before[-1:], after[:1]
    if (left and left in _BRACKETS) or (right and right in _PUNCTUATION):
        return True
    if left and right and left in _QUOTES and right in _QUOTES:
        outside = before.rstrip(_QUOTES)[-1:]  # a quote that closes stands behind a word
        return not outside or outside.isspace() or outside in _BRACKETS
    if before.strip():
        return left.isspace()
    return not text[:start].strip() and right.isspace() and bool(after.strip())


def row_id(row: dict[str, Any]) -> str:
    """The row's own id, or "" when it has none."""
    for key in ID_KEYS:
        if isinstance(row.get(key), str | int) and str(row[key]):
            return str(row[key])
    return ""


def row_licence(row: dict[str, Any]) -> str:
    """The licence that the row states."""
    value = row.get("licence") or row.get("license")
    return value if isinstance(value, str) else UNKNOWN_LICENCE


def row_teacher(row: dict[str, Any]) -> str:
    """The model that the row says wrote its replies, also as `metadata.teacher_model.name`."""
    for holder in (row, row.get("metadata"), row.get("response")):
        if not isinstance(holder, dict):
            continue
        value = holder.get("teacher_model") or next(
            (holder[key] for key in TEACHER_KEYS if holder.get(key)), None
        )
        name = value.get("name") if isinstance(value, dict) else value
        if isinstance(name, str):
            return name
    return ""


def without_nulls(value: Any) -> Any:
    """A copy without the keys whose value is null, at any depth.

    Raises:
        RowError: a value deeper than Python's stack.
    """
    try:
        return _without_nulls(value)
    except RecursionError as error:
        raise RowError(_TOO_DEEP) from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def to_json(value: Any, what: str) -> str:
    """The JSON text of a value; `what` names it in the refusal.

    Raises:
        RowError: a value that JSON has not, as Parquet's dates and bytes, and what Python reads as
            NaN; or one so deep that a template could not be expected to render it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RowError(f"{what}: {error}") from error
    if text.count("{") + text.count("[") > _MAX_DEPTH and _is_deeper(value, _MAX_DEPTH):
        raise RowError(f"{what}: {_TOO_DEEP}")
    return text


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_is_deeper(item, depth - 1) for item in inner)


def from_json(text: str, what: str) -> Any:
    """The value of a JSON text; `what` names it in the refusal.

    Raises:
        RowError: broken JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what}: broken JSON") from error


def from_json_or_python(text: str, what: str) -> Any:
    """The value of a JSON text, of Python's repr of one, or of JSON texts one a line.

    Raises:
        RowError: none of them.
    """
    text = text.strip()
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(json.dumps(ast.literal_eval(text)))  # no sets or bytes get through
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        pass
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what}: neither JSON nor a Python literal") from error


def _wrapped(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise RowError("a tool's schema is not a JSON object")
    function = schema.get("function", schema)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool without a name")
    if function is not schema:
        return {"type": "function", **schema}
    rest = {k: v for k, v in schema.items() if k not in ("type", "input_schema")}
    if "input_schema" in schema:
        rest["parameters"] = schema["input_schema"]
    return {"type": "function", "function": rest}
