"""The formats of rows, as tables: adding one is one small module and one line here.

A format says whether a row is of its shape by looking at the keys, never at the file's name, and
reads it into the internal form. A row that no format claims is refused: nothing is ever guessed
to be a reply. Most formats are one row a conversation; a file format is a file whose items make
up one or several conversations together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from graft.errors import UsageError
from mtp.data.conversation import Conversation, Document, Note, RowError
from mtp.data.formats import (
    claude_code,
    code,
    logs,
    messages,
    openhands,
    pairs,
    prompts,
    protocols,
    responses,
    sweagent,
    tau2,
    turns,
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """`matches(row)` recognises the shape; `read(row)` may raise RowError."""

    name: str
    matches: Callable[[Any], bool]
    read: Callable[[Any], Conversation | Document | Note]


# What the items of a file became: (their line numbers, the conversation or why there is none).
Parts = Iterator[tuple[list[int], Conversation | RowError | Note]]


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """`is_part(item)` recognises an item; `read_parts` gets all (line, item) of one file."""

    name: str
    is_part: Callable[[Any], bool]
    read_parts: Callable[[list[tuple[int, Any]]], Parts]


def _together(read: Callable[[list[Any]], Conversation]) -> Callable[[list[Any]], Parts]:
    """A reader of files that are one conversation each."""

    def read_parts(rows: list[tuple[int, Any]]) -> Parts:
        numbers = [number for number, _ in rows]
        try:
            broken = next((item for _, item in rows if isinstance(item, RowError)), None)
            if broken is not None:
                raise broken
            yield numbers, read([item for _, item in rows])
        except RowError as error:
            yield numbers, error

    return read_parts


# The first that matches wins, so what is more particular stands first.
FORMATS: tuple[Format, ...] = (
    Format(name="openai-responses", matches=responses.matches, read=responses.read),
    Format(name="request-log", matches=logs.matches, read=logs.read),
    Format(name="openhands-events", matches=openhands.matches, read=openhands.read),
    Format(name="swe-agent", matches=sweagent.is_traj, read=sweagent.read_traj),
    Format(name="mini-swe-agent", matches=sweagent.is_mini, read=sweagent.read_mini),
    Format(name="atif", matches=protocols.is_atif, read=protocols.read_atif),
    Format(name="adp", matches=protocols.is_adp, read=protocols.read_adp),
    Format(name="hermes", matches=messages.is_tagged, read=messages.read_tagged),
    Format(name="swift-chatml", matches=messages.is_swift, read=messages.read),
    Format(name="openai-messages", matches=messages.is_messages, read=messages.read),
    Format(name="json-text-messages", matches=messages.is_json_text, read=messages.read_json_text),
    Format(name="sharegpt", matches=messages.is_sharegpt, read=messages.read),
    Format(name="trajectory", matches=messages.is_trajectory, read=messages.read_agent),
    Format(name="tau-bench", matches=messages.is_tau, read=messages.read_agent),
    Format(name="xlam", matches=pairs.is_xlam, read=pairs.read_xlam),
    Format(name="acecode", matches=code.is_acecode, read=code.read_acecode),
    Format(name="humaneval", matches=code.is_humaneval, read=code.read_humaneval),
    Format(name="opencode-instruct", matches=pairs.is_open_code, read=pairs.read_code_pair),
    Format(name="magicoder", matches=pairs.is_magicoder, read=pairs.read_code_pair),
    Format(name="bfcl-prompts", matches=prompts.is_bfcl, read=prompts.read_bfcl),
    Format(name="spec-bench-prompts", matches=prompts.is_spec_bench, read=prompts.read_spec_bench),
    Format(name="prompt-completion", matches=pairs.is_pair, read=pairs.read_pair),
    Format(name="prompts", matches=prompts.is_prompt, read=prompts.read_prompt),
    Format(name="code-rows", matches=code.is_file, read=code.read_file),
    Format(name="message-list", matches=turns.is_turn_list, read=messages.read_parts),
)
FILE_FORMATS: tuple[FileFormat, ...] = (
    FileFormat(name="claude-code", is_part=claude_code.is_line, read_parts=claude_code.read_parts),
    FileFormat(
        name="openhands-events",
        is_part=openhands.is_event,
        read_parts=_together(openhands.read_parts),
    ),
    FileFormat(name="tau2-bench", is_part=tau2.is_results, read_parts=tau2.read_parts),
    FileFormat(
        name="message-list", is_part=turns.is_turn, read_parts=_together(messages.read_parts)
    ),
)


@dataclass(frozen=True, kw_only=True)
class Recogniser:
    """Which reader gets a row: one that was asked for, or the first that knows its shape."""

    refusal: str = "unknown shape"
    formats: tuple[Format, ...] = FORMATS
    file_formats: tuple[FileFormat, ...] = FILE_FORMATS

    def read(self, row: Any) -> tuple[str, Conversation | Document | Note | RowError]:
        """(name of the format that claims the row or "unknown", the value or the refusal)."""
        for format_ in self.formats:
            if format_.matches(row):
                try:
                    return format_.name, format_.read(row)
                except RowError as error:
                    return format_.name, error
        if isinstance(row, dict):
            keys = ", ".join(sorted(map(str, row))[:8])
            return "unknown", RowError(f"{self.refusal}, keys: {keys or 'none'}")
        return "unknown", RowError(f"{self.refusal}: a JSON {type(row).__name__}")

    def file_format(self, item: Any) -> FileFormat | None:
        """The format of a file that has such an item near its start."""
        if any(format_.matches(item) for format_ in self.formats):
            return None
        return next((f for f in self.file_formats if f.is_part(item)), None)


def recogniser(name: str | None = None, mapping: str | None = None) -> Recogniser:
    """A recogniser for `--format NAME` and `--map prompt=KEY,response=KEY` or `--map text=KEY`.

    Rows that have the mapped keys are read by them; all others are recognised as usual.

    Raises:
        UserError: an unknown format, or a mapping that cannot be read.
    """
    formats, file_formats = FORMATS, FILE_FORMATS
    if name is not None:
        formats = tuple(f for f in FORMATS if f.name == name)
        file_formats = tuple(f for f in FILE_FORMATS if f.name == name)
        if not formats and not file_formats:
            known = sorted({f.name for f in FORMATS} | {f.name for f in FILE_FORMATS})
            raise UsageError(f"a format: {', '.join(known)}", repr(name), "fix --format")
    if mapping is not None:
        formats = (_mapped(mapping), *formats)
    refusal = "unknown shape" if name is None else f"not of the format {name}"
    return Recogniser(refusal=refusal, formats=formats, file_formats=file_formats)


def _mapped(mapping: str) -> Format:
    parts = [part.partition("=") for part in mapping.split(",")]
    keys = {name: key for name, _, key in parts}
    if set(keys) == {"text"}:
        text = keys["text"]
        return Format(
            name="mapped",
            matches=lambda row: isinstance(row, dict) and text in row,
            read=lambda row: code.read_text(row, text),
        )
    if "prompt" not in keys or not set(keys) <= {"prompt", "response"} or "" in keys.values():
        expected = "--map prompt=KEY,response=KEY, prompt=KEY or text=KEY"
        raise UsageError(expected, repr(mapping), "name the keys of your rows")
    matches, read = pairs.mapped_pair(keys)
    return Format(name="mapped", matches=matches, read=read)
