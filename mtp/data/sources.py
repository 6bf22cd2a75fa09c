"""Sources in, items out: files and folders, `datasets` folders, Hub data sets.

A folder is read by suffix: files of rows (`.jsonl`, `.json`, `.traj`, Parquet, compressed ones)
and source files, which are documents; `.json` files are left out where source files lie beside
them (a code tree is full of settings in JSON). What is not read is counted by suffix, so that
nothing disappears silently. Inside a file of rows only the content counts (rows.py, formats/).
"""

from __future__ import annotations

import itertools
import os
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graft.errors import UserError
from mtp.data.conversation import (
    Conversation,
    Document,
    Note,
    RowError,
    content_digest,
    printable,
)
from mtp.data.filters import RowFilter
from mtp.data.formats import Recogniser
from mtp.data.hub import HUB_PREFIX, hub_rows, is_dataset_folder, saved_rows
from mtp.data.rows import LostRowsError, Rows, first_character, read_rows

LINE_SUFFIXES = (".jsonl", ".ndjson")
ROW_SUFFIXES = frozenset((*LINE_SUFFIXES, ".json", ".traj", ".parquet"))
COMPRESSED_SUFFIXES = (".gz", ".zst")
# fmt: off
CODE_SUFFIXES = frozenset((
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".js",
    ".jsx", ".ts", ".tsx", ".rb", ".php", ".cs", ".swift", ".kt", ".scala", ".sh", ".lua", ".sql",
    ".r", ".jl", ".hs", ".ml", ".ex", ".pl",
))
# fmt: on
WRAPPERS = ("data", "rows", "examples", "instances", "train")
SKIPPED_FOLDERS = frozenset(("__pycache__", "node_modules"))
_ITEMS_TO_TRY = 16  # a session log may open with notes that tell nothing


@dataclass(frozen=True, kw_only=True)
class Item:
    """What stands at a place: something to learn from, or why it is not used.

    Args:
        source: as it was asked for.
        file: the file, or the data set.
        line: the first of its lines, from 1; in Parquet and data sets the row.
        format: the format that claimed it, "code" for source files, else "unknown".
        value: what it says; a RowError is a row that is broken, a Note one that is of no use.
        num_rows: rows that it was made of: more than one where a file is a conversation.
        digest: of what it says, see `content_digest`; "" when there is nothing to learn from.
        row: as it stands in the file, where `Reading.keep_rows` asks for it.
    """

    source: str
    file: str
    line: int
    format: str
    value: Conversation | Document | RowError | Note
    num_rows: int = 1
    digest: str = ""
    row: Any = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read sources: which formats to try, which rows to use, whether items hold them."""

    recogniser: Recogniser = field(default_factory=Recogniser)
    filters: tuple[RowFilter, ...] = ()
    keep_rows: bool = False


def read_source(source: str | Path, ignored: Counter[str], reading: Reading) -> Iterator[Item]:
    """Yield every row and document of a source, in a stable order.

    Args:
        source: a file, a folder, or `hub:owner/name?config=...&split=...&revision=...`.
        ignored: receives the number of files that were not read, by suffix.
        reading: formats and filters.

    Raises:
        UserError: the source is missing, a file of a kind that is not read, or one that breaks in
            a way that loses the rows after it.
    """
    place = _Place(source=str(source), file=str(source), name=str(source))
    path = Path(source)
    if str(source).startswith(HUB_PREFIX):
        name, rows = hub_rows(str(source))
        yield from _items(replace(place, name=name), rows, reading)
        return
    place = replace(place, name=path.resolve().name)
    if path.is_dir() and is_dataset_folder(path):
        for part, rows in saved_rows(path):
            yield from _items(replace(place, file=part), rows, reading)
        return
    root, files = _files(path, ignored)
    for file in files:
        place = replace(place, file=str(file))
        if file.suffix in CODE_SUFFIXES:
            identity = f"{root.resolve().name}/{file.relative_to(root).as_posix()}"
            yield place.item(_document(file, identity), line=1, format_name="code")
        else:
            rows = read_rows(file, lambda item: reading.recogniser.file_format(item) is not None)
            yield from _items(place, rows, reading)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where rows come from; `name` is what the conversations record."""

    source: str
    file: str
    name: str

    def item(self, value: Any, *, line: int, format_name: str, num_rows: int = 1) -> Item:
        digest = ""
        if isinstance(value, Conversation | Document):
            try:
                digest = content_digest(value)
                value = replace(
                    value,
                    id=printable(value.id) or f"sha256:{digest[:16]}",
                    source=printable(self.name),
                    licence=printable(value.licence),
                    teacher=printable(value.teacher),
                )
            except RowError as error:
                value = error
        if isinstance(value, RowError):
            value = RowError(printable(str(value)))
        return Item(
            source=printable(self.source),
            file=printable(self.file),
            line=line,
            format=format_name,
            value=value,
            num_rows=num_rows,
            digest=digest,
        )


def require_sources(sources: Sequence[str | Path]) -> None:
    """Refuse a wrong source before the ones in front of it have taken their hours.

    Raises:
        UserError: there is none, a local one is missing, or a file of a kind that is not read.
    """
    if not sources:
        raise UserError("at least one source", "none", "name one")
    for source in sources:
        if not str(source).startswith(HUB_PREFIX) and not Path(source).is_dir():
            _require_file(Path(source))


def _files(source: Path, ignored: Counter[str]) -> tuple[Path, list[Path]]:
    """(the folder that names are relative to, the files to read)."""
    if source.is_dir():
        return source, _readable(sorted(_walk(source, ignored)), ignored)
    _require_file(source)
    return source.parent, [source]


def _require_file(source: Path) -> None:
    if not source.is_file():
        expected = "a file or a folder of training data"
        raise UserError(expected, f"nothing at {source}", "name one that is there")
    if not (_has_rows(source) or source.suffix in CODE_SUFFIXES):
        try:
            known = first_character(source) in (b"[", b"{", b"P")
        except (OSError, EOFError):
            known = False
        if not known:
            raise UserError(
                "JSON, JSON Lines, Parquet, a source file, or a folder of them",
                f"{source}",
                "convert it to JSON lines with a 'messages' list",
            )


def _walk(folder: Path, ignored: Counter[str]) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        for name in folders:
            if name.startswith(".") or name in SKIPPED_FOLDERS:
                ignored["hidden folders" if name.startswith(".") else name] += 1
            elif Path(parent, name).is_symlink():
                ignored["links to folders"] += 1
        folders[:] = [f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS]
        for name in files:
            if name.startswith("."):
                ignored["hidden files"] += 1
            else:
                yield Path(parent, name)


def _has_rows(file: Path) -> bool:
    """Whether the name is that of a file of rows, compressed or not."""
    name = file.with_suffix("") if file.suffix in COMPRESSED_SUFFIXES else file
    return name.suffix in ROW_SUFFIXES


def _readable(files: list[Path], ignored: Counter[str]) -> list[Path]:
    has_code = any(file.suffix in CODE_SUFFIXES for file in files)
    wanted = {
        file
        for file in files
        if file.suffix in CODE_SUFFIXES
        or (_has_rows(file) and not (has_code and file.suffix == ".json"))
    }
    ignored.update(printable(file.suffix or file.name) for file in files if file not in wanted)
    return [file for file in files if file in wanted]


def _document(file: Path, identity: str) -> Document | RowError:
    """A source file; Python's own rules find the encoding of a Python file."""
    try:
        if file.suffix == ".py":
            with tokenize.open(file) as stream:
                text = stream.read()
        else:
            text = file.read_bytes().decode("utf-8-sig")
    except (UnicodeDecodeError, SyntaxError):
        return RowError("not text in its declared encoding")
    except OSError as error:
        return RowError(f"cannot be read: {error.strerror}")
    return Document(id=identity, text=text)


def _items(place: _Place, rows: Rows, reading: Reading) -> Iterator[Item]:
    line = 0
    try:
        opening = list(itertools.islice(rows, _ITEMS_TO_TRY))
        formats = (reading.recogniser.file_format(item) for _, item in opening)
        whole = next((format_ for format_ in formats if format_), None)
        if len(opening) == 1:
            opening = _unwrapped(*opening[0], reading)
        rest = itertools.chain(opening, rows)
        if whole is not None:
            for lines, value in whole.read_parts(list(rest)):
                num_rows = len(lines)
                yield place.item(value, line=lines[0], format_name=whole.name, num_rows=num_rows)
            return
        for line, row in rest:
            name, value = _read_row(row, reading)
            item = place.item(value, line=line, format_name=name)
            yield replace(item, row=row) if reading.keep_rows else item
    except (OSError, EOFError, zlib.error, LostRowsError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = f"line {error.line}" if isinstance(error, LostRowsError) else f"after line {line}"
        raise UserError(
            "files of rows that can be read to their end",
            f"{place.file}, {where}: {reason}; how many rows are lost is not known",
            "repair that file (or fetch it again), or leave it out",
        ) from error


def _unwrapped(line: int, value: Any, reading: Reading) -> list[tuple[int, Any]]:
    """The rows of a file that is one object of no known format, with all rows under one key."""
    if isinstance(value, dict) and reading.recogniser.read(value)[0] == "unknown":
        inner = next((value[key] for key in WRAPPERS if isinstance(value.get(key), list)), None)
        if inner and all(isinstance(row, dict) for row in inner):
            return [(line, row) for row in inner]
    return [(line, value)]


def _read_row(row: Any, reading: Reading) -> tuple[str, Any]:
    if isinstance(row, RowError):
        return "unknown", row
    try:
        unwanted = next((f for f in reading.filters if not f.keeps(row)), None)
    except RowError as error:
        return "unknown", error
    name, value = reading.recogniser.read(row)
    return name, value if unwanted is None else Note(reason=f"not {unwanted}")
