"""What became of every row: nothing that was read may disappear without a line here."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graft.errors import UserError
from mtp.data.conversation import Conversation, Document

MAX_LISTED, MAX_SHOWN = 1000, 5  # refused rows in data.json, on the terminal


@dataclass(frozen=True, kw_only=True)
class BrokenRow:
    """A refused row, by file and 1-based line."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(kw_only=True)
class SplitCounts:
    """One side of the split, after windows were cut."""

    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    conversations: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class PrepareReport:
    """Counts of a preparation.

    Args:
        rows_read: rows and code files found in the sources.
        formats: rows by the format that claimed them.
        broken: refused rows.
        dropped: well-formed rows without use, by reason (empty, duplicate, too short).
        ignored_files: files in folders that are not training data, by suffix.
        split_by_template: extra rows because the template renders old turns differently.
        split_by_length: extra rows because of the length limit.
        cut_inside_turn: rows in which a turn had to be cut.
        supervised_tokens_lost: tokens of replies that fit in no window.
        edge_tokens: tokens over the edge of a reply, left unsupervised.
    """

    rows_read: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    broken: list[BrokenRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    ignored_files: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)
    licences: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    split_by_template: int = 0
    split_by_length: int = 0
    cut_inside_turn: int = 0
    supervised_tokens_lost: int = 0
    edge_tokens: int = 0
    train: SplitCounts = field(default_factory=SplitCounts)
    held_out: SplitCounts = field(default_factory=SplitCounts)

    def add_broken(self, file: Path, line: int, reason: str) -> None:
        """Note a refused row."""
        self.broken.append(BrokenRow(file=str(file), line=line, reason=reason))

    def add_row(
        self, counts: SplitCounts, loss_mask: np.ndarray, item: Conversation | Document
    ) -> None:
        """Note a written row on one side of the split; loss_mask [T] bool."""
        counts.rows += 1
        counts.tokens += len(loss_mask)
        counts.supervised_tokens += int(loss_mask.sum())
        counts.conversations.add(item.id)
        self.categories[item.category] += 1
        self.licences[item.licence] += 1
        self.sources[item.source] += 1

    def check(self, *, max_skip: float) -> None:
        """Refuse a result that stands on too few of the rows.

        Raises:
            UserError: no rows at all, more than `max_skip` of them refused, or none to train on.
        """
        if not self.rows_read:
            raise UserError(
                "rows or code files in the sources",
                f"none (files of other kinds: {sum(self.ignored_files.values())})",
                "point --source at .jsonl or .json files or at a folder with code",
            )
        if len(self.broken) > max_skip * self.rows_read:
            raise UserError(
                f"at most {max_skip:.1%} of rows that cannot be used",
                f"{len(self.broken)} of {self.rows_read}, the first at {self.broken[0]}",
                "repair the rows, or raise --max-skip",
            )
        if not self.train.rows:
            raise UserError(
                "at least one row to train on",
                f"{self.rows_read} rows read, dropped: {dict(self.dropped)},"
                f" held out: {self.held_out.rows}",
                "add data, or lower the held-out percentage",
            )

    def as_text(self) -> str:
        """The report for a terminal, one fact a line."""
        lines = [
            f"rows read       {self.rows_read} ({_counts(self.formats)})",
            f"rows refused    {len(self.broken)}",
            *(f"                {row}" for row in self.broken[:MAX_SHOWN]),
            f"rows dropped    {self.dropped.total()} ({_counts(self.dropped)})",
            f"files ignored   {self.ignored_files.total()} ({_counts(self.ignored_files)})",
            f"rows split      {self.split_by_length} by length, {self.split_by_template} by the"
            f" template; {self.cut_inside_turn} cut inside a turn",
            f"tokens lost     {self.supervised_tokens_lost} supervised ones that fit no window;"
            f" {self.edge_tokens} over an edge",
        ]
        for name, counts in (("train", self.train), ("held out", self.held_out)):
            share = counts.supervised_tokens / max(counts.tokens, 1)
            lines.append(
                f"{name:15} {counts.rows} rows of {len(counts.conversations)} conversations,"
                f" {counts.tokens} tokens, {share:.1%} supervised"
            )
        lines.append(f"categories      {_counts(self.categories)}")
        lines.append(f"licences        {_counts(self.licences)}")
        return "\n".join(lines).replace(" ()", "")

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        reasons = Counter(re.sub(r"message \d+", "message N", row.reason) for row in self.broken)
        return {
            "rows_read": self.rows_read,
            "rows_refused": len(self.broken),
            "refused_by_reason": dict(reasons.most_common()),
            "refused": [vars(row) for row in self.broken[:MAX_LISTED]],
            "dropped": dict(self.dropped),
            "ignored_files": dict(self.ignored_files),
            "formats": dict(self.formats),
            "rows_by_category": dict(self.categories),
            "rows_by_licence": dict(self.licences),
            "rows_by_source": dict(self.sources),
            "split_by_template": self.split_by_template,
            "split_by_length": self.split_by_length,
            "cut_inside_turn": self.cut_inside_turn,
            "supervised_tokens_lost": self.supervised_tokens_lost,
            "edge_tokens": self.edge_tokens,
            "train": _split_dict(self.train),
            "held_out": _split_dict(self.held_out),
        }


def _split_dict(counts: SplitCounts) -> dict[str, Any]:
    return {
        "rows": counts.rows,
        "conversations": len(counts.conversations),
        "tokens": counts.tokens,
        "supervised_tokens": counts.supervised_tokens,
        "supervised_share": round(counts.supervised_tokens / max(counts.tokens, 1), 4),
    }


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())
