"""Files in, items out: walks sources, splits files into rows, and hands rows to their format.

A folder is read by suffix: `.jsonl` files are rows, source files are documents, and `.json`
files are rows unless source files lie beside them (a code tree is full of settings in JSON).
What is not read is counted by suffix, so that nothing disappears silently.
"""

from __future__ import annotations

import os
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graft.errors import UserError
from mtp.data.conversation import (
    UNKNOWN_LICENCE,
    Conversation,
    Document,
    RowError,
    content_digest,
)
from mtp.data.formats import read_row
from mtp.data.rows import json_file, json_lines

LINE_SUFFIXES = (".jsonl", ".ndjson")
# fmt: off
CODE_SUFFIXES = frozenset((
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".js",
    ".jsx", ".ts", ".tsx", ".rb", ".php", ".cs", ".swift", ".kt", ".scala", ".sh", ".lua", ".sql",
    ".r", ".jl", ".hs", ".ml", ".ex", ".pl",
))
# fmt: on
SKIPPED_FOLDERS = frozenset(("__pycache__", "node_modules"))


@dataclass(frozen=True, kw_only=True)
class Item:
    """What stands at a place: something to learn from, or the reason why it cannot be used."""

    file: Path
    line: int
    format: str
    value: Conversation | Document | RowError


def read_source(source: Path, ignored: Counter[str]) -> Iterator[Item]:
    """Yield every row and document of a file or a folder, in a stable order.

    Args:
        source: a file or a folder.
        ignored: receives the number of files that were not read, by suffix.

    Raises:
        UserError: the source is missing, or a file of a kind that is not read.
    """
    if source.is_dir():
        root, files = source, _readable(sorted(_walk(source)), ignored)
    elif source.is_file():
        root, files = source.parent, [source]
        if source.suffix not in (*LINE_SUFFIXES, ".json") and source.suffix not in CODE_SUFFIXES:
            raise UserError(
                "a .jsonl or .json file, a source file, or a folder of them",
                f"{source}",
                "convert it to JSON lines with a 'messages' list",
            )
    else:
        raise UserError(
            "a file or a folder of training data", f"nothing at {source}", "fix --source"
        )
    name = source.resolve().name
    for file in files:
        if file.suffix in CODE_SUFFIXES:
            identity = f"{root.resolve().name}/{file.relative_to(root).as_posix()}"
            yield _document(file, identity, name)
        else:
            yield from _rows(file, name)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS]
        yield from (Path(parent, file) for file in files if not file.startswith("."))


def _readable(files: list[Path], ignored: Counter[str]) -> list[Path]:
    has_code = any(file.suffix in CODE_SUFFIXES for file in files)
    wanted = CODE_SUFFIXES | set(LINE_SUFFIXES) | (set() if has_code else {".json"})
    ignored.update(file.suffix or file.name for file in files if file.suffix not in wanted)
    return [file for file in files if file.suffix in wanted]


def _document(file: Path, identity: str, source: str) -> Item:
    """A source file; Python's own rules find the encoding of a Python file."""
    value: Document | RowError
    try:
        if file.suffix == ".py":
            with tokenize.open(file) as stream:
                text = stream.read()
        else:
            text = file.read_bytes().decode("utf-8-sig")
        value = Document(id=identity, source=source, licence=UNKNOWN_LICENCE, text=text)
    except (UnicodeDecodeError, SyntaxError):
        value = RowError("not text in its declared encoding")
    except OSError as error:
        value = RowError(f"cannot be read: {error.strerror}")
    return Item(file=file, line=1, format="code", value=value)


def _rows(file: Path, source: str) -> Iterator[Item]:
    rows = json_lines(file) if file.suffix in LINE_SUFFIXES else json_file(file)
    try:
        for line, row in rows:
            yield _item(file, line, row, source)
    except OSError as error:
        reason = RowError(f"cannot be read: {error.strerror}")
        yield Item(file=file, line=1, format="unknown", value=reason)


def _item(file: Path, line: int, row: Any, source: str) -> Item:
    if isinstance(row, RowError):
        return Item(file=file, line=line, format="unknown", value=row)
    format_name = "unknown"
    value: Conversation | RowError
    try:
        format_name, conversation = read_row(row, source)
        digest = content_digest(conversation)
        value = replace(conversation, id=conversation.id or f"sha256:{digest[:16]}")
    except RowError as error:
        value = error
    return Item(file=file, line=line, format=format_name, value=value)
