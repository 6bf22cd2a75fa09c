"""Files as (line number, value), where a broken row is a RowError value.

What a file is, its bytes say: gzip, zstd and Parquet have their marks, and a text is JSON Lines
or JSON whatever its name is (`.json` files often hold JSON Lines, and a `.jsonl` of one line is
JSON). Nothing is read whole: lines are parsed one by one, a JSON list item by item.

A broken line loses that line. What breaks a list, Parquet or compressed data loses all that comes
after it, nobody knows how much, so that is an error and not a row.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mtp.data.conversation import RowError

Rows = Iterator[tuple[int, Any]]
_SPACE = re.compile(r"\s*")
_GZIP, _ZSTD, _PARQUET, _BOM = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # PowerShell's `>`; UTF-32 begins with the first, too
_CHUNK = 1 << 20
_MAX_ROW = 1 << 29  # characters; a longer row is a broken one
_LINES_TO_TRY, _ROWS_A_BATCH = 16, 64


def read_rows(file: Path, is_part: Callable[[Any], bool]) -> Rows:
    """Every row of a file, of any of the kinds above.

    A Parquet row's number is its position, from 1. A JSON list whose first item `is_part` of a
    conversation is one row.

    Raises:
        OSError, EOFError, zlib.error: the file cannot be read, or its compressed data is broken.
        LostRowsError: what comes after a place cannot be read.
    """
    with file.open("rb") as stream:
        mark = stream.read(4)
    if mark == _PARQUET:
        yield from _parquet_rows(file)
        return
    if mark.startswith(_UTF_16):
        raise LostRowsError("UTF-16 text, not UTF-8", 1)
    with _opened(file, mark) as stream:
        if _is_lines(stream):
            stream.seek(0)
            yield from _json_lines(stream)
        else:
            stream.seek(0)
            is_list = first_character(file) == b"["
            yield from _json_values(stream, is_part, is_list)


def first_character(file: Path) -> bytes:
    """The first byte of a text that is no space, b"" when there is none; b"P" for Parquet."""
    with file.open("rb") as stream:
        mark = stream.read(4)
    if mark == _PARQUET:
        return b"P"
    with _opened(file, mark) as stream:
        return stream.read(_CHUNK).removeprefix(_BOM).lstrip()[:1]


def _opened(file: Path, mark: bytes) -> IO[bytes]:
    if mark.startswith(_GZIP):
        return io.BufferedReader(gzip.open(file, "rb"))
    if mark == _ZSTD:
        return _Zstd(file)
    return file.open("rb")


class _Zstd(io.BufferedReader):
    """A zstd file through pyarrow's codec, which `datasets` brings; rewinds by opening anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        super().__init__(self._raw())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go back to the start; no other place can be reached."""
        if offset or whence:
            raise io.UnsupportedOperation("only to the start")
        super().__init__(self._raw())
        return 0

    def _raw(self) -> Any:
        import pyarrow as pa

        return pa.input_stream(str(self._file), compression="zstd")


def _is_lines(stream: IO[bytes]) -> bool:
    """Whether a text is JSON Lines: one of its first lines is an object by itself.

    A line counts from its first character on, so that indented JSON does not look like lines.
    Several lines that all open an object are lines too, if broken ones.
    """
    start = b""
    while not start.strip() and (chunk := stream.read(64)):
        start = chunk.removeprefix(_BOM).lstrip()
    if start.startswith(b"["):
        return False
    stream.seek(0)
    opening = []
    for number in range(_LINES_TO_TRY):
        line = stream.readline(_MAX_ROW)
        if not line:
            break
        line = line.removeprefix(_BOM) if number == 0 else line
        if line.startswith(b"{") and not isinstance(_parsed(line), RowError):
            return True
        if line.strip():
            opening.append(line.startswith(b"{"))
    return len(opening) > 1 and all(opening)


def _json_lines(stream: IO[bytes]) -> Rows:
    """Each non-empty line; lines end at \\n only (U+2028 and the like are text in JSON)."""
    for line, raw in enumerate(stream, start=1):
        text = raw.removeprefix(_BOM) if line == 1 else raw
        if text.strip():
            yield line, _parsed(text)


def _json_values(stream: IO[bytes], is_part: Callable[[Any], bool], is_list: bool) -> Rows:
    """JSON values one after another, lists of rows item by item, up to what is broken.

    A file that holds one value, or one conversation as a list, is one row, and one row is broken.
    """
    scanner, is_first = _Scanner(stream), True
    try:
        while character := scanner.peek():
            line = scanner.line
            if character == "[":
                for number, item in _list_items(scanner, line, is_part):
                    is_first = False
                    yield number, item
            else:
                yield line, scanner.value()
            is_first = False
    except LostRowsError as error:
        if not is_first or error.in_rows:
            raise
        yield error.line, RowError(str(error))
    except UnicodeDecodeError as error:
        if not is_first or is_list:
            raise LostRowsError("not UTF-8", scanner.line) from error
        yield scanner.line, RowError("not UTF-8")


def _list_items(scanner: _Scanner, line: int, is_part: Callable[[Any], bool]) -> Rows:
    scanner.skip(1)
    parts: list[Any] | None = None  # the items of a list that is one conversation
    first = True
    while scanner.peek() != "]":
        item_line = scanner.line
        try:
            item = scanner.value()
        except LostRowsError as error:
            error.in_rows = parts is None
            raise
        if first and is_part(item):
            parts = []
        first = False
        if parts is None:
            yield item_line, item
        else:
            parts.append(item)
        if scanner.peek() == ",":
            scanner.skip(1)
        elif scanner.peek() != "]":
            raise LostRowsError("broken JSON after this row", item_line, in_rows=parts is None)
    scanner.skip(1)
    if parts is not None:
        yield line, parts


class LostRowsError(Exception):
    """From `line` on a file cannot be read; `in_rows` where that is among rows, not inside one."""

    def __init__(self, reason: str, line: int, *, in_rows: bool = False) -> None:
        super().__init__(reason)
        self.line, self.in_rows = line, in_rows


class _Scanner:
    """JSON values out of a text stream, with no more of it in memory than the value at hand."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        self._decoder = json.JSONDecoder()
        self._buffer, self._position, self._ended = "", 0, False
        self.line = 1

    def peek(self) -> str:
        """The next character that is no space, "" at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._position)
            assert match is not None
            self._advance(match.end())
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._read_more():
                return ""

    def skip(self, num_characters: int) -> None:
        """Go past characters that were seen."""
        self._advance(self._position + num_characters)

    def value(self) -> Any:
        """The next value.

        Raises:
            LostRowsError: there is none; names the line.
        """
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                near_end = error.pos >= len(self._buffer) - 16
                cut_off = near_end or error.msg.startswith("Unterminated string")
                if cut_off and self._read_more():
                    continue
                lines = self._buffer.count("\n", self._position, error.pos)
                raise LostRowsError("broken JSON", self.line + lines) from error
            except RecursionError as error:
                raise LostRowsError("JSON nested too deeply", self.line) from error
            # A number at the end of what was read may go on.
            if end < len(self._buffer) or not self._read_more():
                self._advance(end)
                return value

    def _advance(self, position: int) -> None:
        self.line += self._buffer.count("\n", self._position, position)
        self._position = position

    def _read_more(self) -> bool:
        """Read as much again as is waiting, so that a long value is tried few times."""
        waiting = len(self._buffer) - self._position
        if self._ended or waiting > _MAX_ROW:
            return False
        chunk = self._text.read(max(_CHUNK, waiting))
        self._ended = not chunk
        self._buffer = self._buffer[self._position :] + chunk
        self._position = 0
        return bool(chunk)


def _parquet_rows(file: Path) -> Rows:
    """Rows of a Parquet file, a few at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=_ROWS_A_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise LostRowsError(f"broken Parquet: {str(error)[:80]}", number + 1) from error


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return RowError("not UTF-8")
    except (ValueError, RecursionError):
        return RowError("broken JSON")
