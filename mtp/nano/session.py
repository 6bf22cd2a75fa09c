"""One recorded conversation: what was asked, thought, called, seen and answered."""

from __future__ import annotations

import ast
import json
import random
import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mtp.nano.workspace import TOOLS, Workspace

_parsing = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function of a module, as the syntax tree sees it. Lines are 1-based and inclusive.

    `is_strict`: undecorated and without `**keywords`, so that a call with an unknown keyword
    raises before its body runs. `is_searchable`: a search for `def NAME(` finds it, which it does
    not where the source has two blanks or one before the parenthesis.
    """

    name: str
    line: int
    end_line: int
    body_line: int
    indent: int
    arguments: tuple[str, ...]
    local_names: tuple[str, ...]
    docstring: str | None
    is_public_top_level: bool
    is_strict: bool
    is_searchable: bool


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module the agent can be asked about."""

    name: str
    functions: tuple[Function, ...]
    num_classes: int

    @property
    def path(self) -> str:
        return f"{self.name}.py"


@lru_cache(maxsize=256)
def parse_module(path: Path) -> Module:
    """Read what tasks are made of: the functions whose name occurs once, and the classes."""
    # CPython 3.11 counts the recursion of all threads in one place, and then raises "SystemError:
    # AST constructor recursion depth mismatch" when two of them parse at once.
    source = path.read_text(encoding="utf-8")
    with _parsing:
        tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = [node.name for node in nodes]
    top_level = {id(node) for node in tree.body}
    functions = [
        _function(node, is_top_level=id(node) in top_level, source=source)
        for node in sorted(nodes, key=lambda node: node.lineno)
        if names.count(node.name) == 1 and not node.name.startswith("__")
    ]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return Module(name=path.stem, functions=tuple(functions), num_classes=len(classes))


def _function(node: ast.FunctionDef, *, is_top_level: bool, source: str) -> Function:
    stored = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    assigned = dict.fromkeys(name.id for name in stored)
    plain = [*node.args.posonlyargs, *node.args.args]
    arguments = tuple(argument.arg for argument in plain if argument.arg not in ("self", "cls"))
    return Function(
        name=node.name,
        line=node.lineno,
        end_line=node.end_lineno or node.lineno,
        body_line=node.body[0].lineno,
        indent=node.body[0].col_offset,
        arguments=arguments,
        local_names=tuple(name for name in assigned if name not in arguments),
        docstring=ast.get_docstring(node),
        is_public_top_level=is_top_level and not node.name.startswith("_"),
        is_strict=not node.decorator_list and node.args.kwarg is None,
        is_searchable=f"def {node.name}(" in source,
    )


Call = tuple[str, dict[str, Any]]


class Session:
    """Appends messages in OpenAI form while the calls are really carried out.

    Args:
        workspace: where the calls work.
        rng: chooses wording.
        thinks: whether assistant turns carry `reasoning_content`.
    """

    def __init__(self, workspace: Workspace, rng: random.Random, *, thinks: bool) -> None:
        self.workspace, self.rng, self.thinks = workspace, rng, thinks
        self.messages: list[dict[str, Any]] = []
        self._num_calls = 0

    def ask(self, *wordings: str) -> None:
        """Add the user's question in one of its wordings."""
        self.messages.append({"role": "user", "content": self.rng.choice(wordings)})

    def act(self, thought: str, *calls: Call, say: str = "") -> list[str]:
        """Add one assistant turn with its calls (parallel when several) and their real results."""
        tool_calls = []
        for name, arguments in calls:
            self._num_calls += 1
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            identifier = f"call_{self._num_calls}"
            tool_calls.append({"id": identifier, "type": "function", "function": function})
        self._assistant(thought, say, tool_calls)
        outputs = [self.workspace.call(name, arguments) for name, arguments in calls]
        for call, output in zip(tool_calls, outputs, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
        return outputs

    def answer(self, thought: str, text: str) -> None:
        """Add the assistant turn that ends the task."""
        self._assistant(thought, text, [])

    def _assistant(self, thought: str, text: str, tool_calls: list[dict[str, Any]]) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.thinks:
            message["reasoning_content"] = thought
        if tool_calls:
            message["tool_calls"] = tool_calls
        self.messages.append(message)

    def record(self, conversation_id: str, *, source: str, licence: str) -> dict[str, Any]:
        """The conversation as one JSON-ready row, with the tools it used and one more."""
        calls = [call for message in self.messages for call in message.get("tool_calls", [])]
        offered = {call["function"]["name"] for call in calls}
        names = [tool["function"]["name"] for tool in TOOLS]
        offered.update([name for name in names if name not in offered][:1])
        return {
            "schema_version": 1,
            "id": conversation_id,
            "source": source,
            "licence": licence,
            "messages": self.messages,
            "tools": [tool for tool in TOOLS if tool["function"]["name"] in offered],
        }


def read(path: str, start: int, end: int) -> Call:
    return "read_file", {"path": path, "start": start, "end": end}


def grep(pattern: str, path: str | None = None) -> Call:
    return "grep", {"pattern": pattern} | ({"path": path} if path else {})


def edit(path: str, old: str, new: str) -> Call:
    return "edit_file", {"path": path, "old": old, "new": new}


def run(code: str) -> Call:
    return "run_python", {"code": code}


def first_match(grep_output: str) -> tuple[str, int]:
    """Path and line of the first match that grep printed."""
    path, line, _ = grep_output.splitlines()[0].split(":", 2)
    return path, int(line)


def source_lines(read_output: str) -> list[str]:
    """The lines that read_file printed, without their numbers."""
    return re.findall(r"^\d+\t(.*)$", read_output, flags=re.MULTILINE)


def signature(lines: list[str]) -> str:
    """The `def …:` that opens the lines, over as many lines as its parentheses need."""
    depth = 0
    for count, line in enumerate(lines, start=1):
        depth += line.count("(") - line.count(")")
        if depth <= 0 and line.rstrip().endswith(":"):
            return " ".join(part.strip() for part in lines[:count])
    return lines[0].strip()
