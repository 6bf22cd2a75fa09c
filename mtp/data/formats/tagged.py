"""Calls that stand as tags in an assistant's text: Hermes' JSON and Qwen's XML.

Verbatim they would be off what the base generates, so they become structured calls, which the
base's own template renders again.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mtp.data.conversation import RowError
from mtp.data.formats.fields import from_json_or_python

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_OPENS_CALL = re.compile(r"^\s*<tool_call>", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```[ \t]*$", re.MULTILINE | re.DOTALL)  # an example, not a call
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def opens_call(text: Any) -> bool:
    """Whether a line of the text starts with `<tool_call>`; a mention inside a line does not, nor
    does an example in a fenced block of code."""
    return isinstance(text, str) and _OPENS_CALL.search(_FENCE.sub("", text)) is not None


def is_response(text: str) -> bool:
    """Whether a text is tagged tool responses and nothing else."""
    return "<tool_response>" in text and not _RESPONSE.sub("", text).strip()


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(text without its calls, the calls as `{"name", "arguments"}`).

    Raises:
        RowError: a tag that is not closed, or whose body is no call.
    """
    calls = []
    fences = [match.span() for match in _FENCE.finditer(text)]

    def is_call(match: re.Match[str]) -> bool:
        return not any(start <= match.start() < end for start, end in fences)

    for match in filter(is_call, CALL.finditer(text)):
        if not match.group(0).endswith("</tool_call>"):
            raise RowError("a <tool_call> that is never closed")
        calls += _calls(match.group(1))
    return CALL.sub(lambda match: "" if is_call(match) else match[0], text).strip(), calls


def split_responses(text: str) -> list[tuple[str, str]]:
    """(tool name or "", content) of each tagged response; the text itself when there are none."""
    bodies = _RESPONSE.findall(text)
    return [_named(body.strip()) for body in bodies] if bodies else [("", text)]


def split_tools(system: str) -> tuple[str, list[Any]]:
    """(system text without its section on tools, the schemas that stand in it).

    The section goes because the base's template writes its own. It reaches from the heading
    `# Tools`, or from the paragraph that first mentions the tags, to the example of a call that
    follows the schemas, or else to the end of their paragraph.

    Raises:
        RowError: `<tools>` tags, but nothing in them that can be read.
    """
    bodies = [match for match in _TOOLS.finditer(system) if match.group(1).strip()]
    if not bodies:
        return system, []
    block = max(bodies, key=lambda match: len(match.group(1)))
    schemas = from_json_or_python(block.group(1), "<tools>")
    first = system.find("<tools>")
    heading = system.rfind("# Tools", 0, first)
    start = heading if heading >= 0 else system.rfind("\n\n", 0, first) + 1
    example = system.rfind("</tool_call>", block.end())
    paragraph = system.find("\n\n", block.end())
    if example >= 0:
        end = example + len("</tool_call>")
    else:
        end = paragraph if paragraph >= 0 else len(system)
    kept = (system[:start].strip(), system[end:].strip())
    text = "\n\n".join(part for part in kept if part)
    return text, schemas if isinstance(schemas, list) else [schemas]


def _calls(body: str) -> list[dict[str, Any]]:
    functions = _FUNCTION.findall(body)
    if functions:
        return [
            {"name": name.strip(), "arguments": dict(_PARAMETER.findall(inside))}
            for name, inside in functions
        ]
    # Some recorders escaped the line breaks around the body but not the body itself.
    value = from_json_or_python(re.sub(r"^(\\n|\s)+|(\\n|\s)+$", "", body), "<tool_call>")
    return value if isinstance(value, list) else [value]


def _named(body: str) -> tuple[str, str]:
    """Hermes wraps results as `{"name": ..., "content": ...}`."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return "", body
    if not isinstance(value, dict) or not {"name", "content"} <= set(value):
        return "", body
    content = value["content"]
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return str(value["name"] or ""), text
