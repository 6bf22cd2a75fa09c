"""The scripted agent's hands: five tools over a folder of files, with their real output.

Output shows no path of this machine (the folder reads as /workspace), no memory address and is
cut where it is long, so that a recording depends on the interpreter and the seed alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp.nano.stdlib import stdlib_root

MOST_LINES, MOST_MATCHES, MOST_CHARACTERS = 40, 10, 1200
RUN_TIMEOUT_SECONDS = 20


def _schema(name: str, description: str, required: list[str], **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    arguments = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": arguments}
    return {"type": "function", "function": function}


TOOLS: list[dict[str, Any]] = [
    _schema("list_files", "List all files.", []),
    _schema(
        "read_file", "Show numbered lines.", ["path"], path="string", start="integer", end="integer"
    ),
    _schema("grep", "Search by regular expression.", ["pattern"], pattern="string", path="string"),
    _schema(
        "edit_file", "Replace text that occurs once.", ["path", "old", "new"],
        path="string", old="string", new="string",
    ),
    _schema("run_python", "Run Python code.", ["code"], code="string"),
]  # fmt: skip


class Workspace:
    """A folder and the tools that work on it. A failed call answers with text, as a tool does."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._tools: dict[str, Callable[..., str]] = {
            "list_files": self.list_files,
            "read_file": self.read_file,
            "grep": self.grep,
            "edit_file": self.edit_file,
            "run_python": self.run_python,
        }

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run one tool and return what it prints."""
        return self._tools[name](**arguments)

    def list_files(self) -> str:
        paths = sorted(path for path in self.root.rglob("*") if path.is_file())
        return "\n".join(
            f"{path.relative_to(self.root).as_posix()} ({path.stat().st_size} bytes)"
            for path in paths
        )

    def read_file(self, path: str, start: int = 1, end: int | None = None) -> str:
        if not (self.root / path).is_file():
            return f"error: no such file: {path}"
        lines = self._text(path).splitlines()
        last = min(end or len(lines), len(lines))
        shown_last = min(last, start + MOST_LINES - 1)
        shown = [f"{number}\t{lines[number - 1]}" for number in range(start, shown_last + 1)]
        if shown_last < last:
            shown.append(f"[cut: lines {shown_last + 1}-{last} are not shown]")
        return "\n".join(shown) or f"error: {path} has {len(lines)} lines"

    def grep(self, pattern: str, path: str | None = None) -> str:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            return f"error: bad pattern: {error}"
        names = [path] if path else [p.name for p in sorted(self.root.glob("*.py"))]
        matches = [
            f"{name}:{number}:{line}"
            for name in names
            for number, line in enumerate(self._text(name).splitlines(), start=1)
            if expression.search(line)
        ]
        if len(matches) > MOST_MATCHES:
            rest = f"[cut: {len(matches) - MOST_MATCHES} more matches]"
            matches = [*matches[:MOST_MATCHES], rest]
        return "\n".join(matches) or "no matches"

    def edit_file(self, path: str, old: str, new: str) -> str:
        text = self._text(path)
        count = text.count(old)
        if count != 1:
            return f"error: the old text occurs {count} times in {path}, expected exactly once"
        (self.root / path).write_text(text.replace(old, new), encoding="utf-8")
        return f"edited {path}"

    def run_python(self, code: str) -> str:
        # Not `-I`: it would hide the workspace's own copies from imports and ignore the hash
        # seed. The bare environment isolates as well.
        environment = {key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ}
        environment |= {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, "-s", "-S", "-B", "-c", code]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_TIMEOUT_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"error: stopped after {RUN_TIMEOUT_SECONDS} seconds"
        output = self._portable(done.stdout.decode("utf-8", "replace")).rstrip("\n")
        if len(output) > MOST_CHARACTERS:
            cut = len(output) - MOST_CHARACTERS
            output = f"{output[:MOST_CHARACTERS]}\n[cut: {cut} more characters]"
        status = "" if done.returncode == 0 else f"\n[exit code {done.returncode}]"
        return (output or "[no output]") + status

    def _text(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def _portable(self, output: str) -> str:
        output = output.replace(str(self.root), "/workspace")
        output = output.replace(str(stdlib_root()), "/usr/lib/python3")
        return re.sub(r"0x[0-9a-f]{6,}", "0x7f0000000000", output)


_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
