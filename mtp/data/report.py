"""What became of every row: nothing that was read may disappear without a line here."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from graft.errors import UserError
from mtp.data.conversation import MISSING_TOOLS, Note, RowError
from mtp.data.mix import Part
from mtp.data.sources import Item

MAX_LISTED, MAX_SHOWN = 1000, 5  # refused rows in data.json, on the terminal


@dataclass(frozen=True, kw_only=True)
class BrokenRow:
    """A refused row, by file and 1-based line."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Contaminated:
    """A row, and the evaluation item whose text it holds; lines from 1."""

    file: str
    line: int
    evaluation: str
    evaluation_line: int


@dataclass(kw_only=True)
class SplitCounts:
    """One side of the split, after windows were cut."""

    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    conversations: int = 0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is counted apart; `place` is the source as it was asked for, `source` its name."""

    place: str
    source: str
    category: str
    licence: str
    teacher: str

    @property
    def names(self) -> tuple[str, ...]:
        """What a mix may call it, the more particular first."""
        return (self.place, self.source, self.category)


@dataclass(kw_only=True)
class SourceCounts:
    """One source: its rows by format, and those that did not become training rows, by reason.

    `licences` counts conversations. `content_sha256` is over what all its sound rows say, in
    order: a source that was replaced in place shows.
    """

    rows_read: int = 0
    content_sha256: str = ""
    formats: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    licences: Counter[str] = field(default_factory=Counter)

    @property
    def rows_used(self) -> int:
        """Rows that are part of what is trained or evaluated on."""
        return self.rows_read - self.refused.total() - self.dropped.total()


@dataclass(kw_only=True)
class PrepareReport:
    """Counts of a preparation.

    Args:
        by_source: rows and code files read, refused (broken) and dropped (well-formed but of no
            use: empty, duplicate, too short, prompts only, filtered), by source.
        broken: refused rows, the first MAX_LISTED.
        ignored_files: files in folders that are not training data, by suffix.
        categories, licences, sources, teachers: written rows.
        cut_at_mismatch: conversations cut before a tool result without a call, or the reverse.
        split_by_template: extra rows because the template renders old turns differently.
        split_by_length: extra rows because of the length limit.
        cut_inside_turn: rows in which a turn had to be cut.
        windows_too_short: windows that hold nothing to predict, and are not written.
        supervised_tokens_lost: tokens of replies that fit in no window.
        edge_tokens: tokens over the edge of a reply, left unsupervised.
        special_tokens_spelt: special tokens in the text of replies and documents, encoded as text.
        closing_tags_in_text: replies whose text mentions `</think>`; see `split_reasoning`.
        replies_as_generated: replies with the very tokens that the base generated.
        replies_encoded_anew: replies whose recorded tokens say something else than their text.
        contaminated: rows with text of an evaluation set, the first MAX_LISTED.
        secrets: found in rows, by kind.
        evaluation_items, evaluation_items_too_short: by file, those looked for and those not.
        near_duplicates, near_duplicate_groups, largest_group: conversations, see `dedup`.
        held_out_overlap: share of the training side's runs of 13 supervised tokens that are
            held out too, before rows were dropped for it.
        mix: the parts of the mix, if there is one.
    """

    by_source: dict[str, SourceCounts] = field(default_factory=dict)
    broken: list[BrokenRow] = field(default_factory=list)
    ignored_files: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)
    licences: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    teachers: Counter[str] = field(default_factory=Counter)
    cut_at_mismatch: int = 0
    split_by_template: int = 0
    split_by_length: int = 0
    cut_inside_turn: int = 0
    windows_too_short: int = 0
    supervised_tokens_lost: int = 0
    edge_tokens: int = 0
    special_tokens_spelt: int = 0
    closing_tags_in_text: int = 0
    replies_as_generated: int = 0
    replies_encoded_anew: int = 0
    contaminated: list[Contaminated] = field(default_factory=list)
    secrets: Counter[str] = field(default_factory=Counter)
    evaluation_items: dict[str, int] = field(default_factory=dict)
    evaluation_items_too_short: dict[str, int] = field(default_factory=dict)
    near_duplicates: int = 0
    near_duplicate_groups: int = 0
    largest_group: int = 0
    held_out_overlap: float = 0.0
    mix: list[Part] = field(default_factory=list)
    train: SplitCounts = field(default_factory=SplitCounts)
    held_out: SplitCounts = field(default_factory=SplitCounts)

    @property
    def rows_read(self) -> int:
        """Rows and code files found in all sources."""
        return sum(counts.rows_read for counts in self.by_source.values())

    @property
    def rows_refused(self) -> int:
        """Rows that cannot be used."""
        return sum(counts.refused.total() for counts in self.by_source.values())

    @property
    def formats(self) -> Counter[str]:
        """Rows by the format that claimed them."""
        return sum((counts.formats for counts in self.by_source.values()), Counter())

    @property
    def dropped(self) -> Counter[str]:
        """Well-formed rows without use, by reason."""
        return sum((counts.dropped for counts in self.by_source.values()), Counter())

    def add_read(self, item: Item) -> None:
        """Note what was read at a place, usable or not."""
        counts = self.by_source.setdefault(item.source, SourceCounts())
        counts.rows_read += item.num_rows
        counts.formats[item.format] += item.num_rows
        if item.digest:
            chained = f"{counts.content_sha256}{item.digest}".encode()
            counts.content_sha256 = hashlib.sha256(chained).hexdigest()
        if isinstance(item.value, RowError):
            self.add_refused(item, str(item.value))
        elif isinstance(item.value, Note):
            self.add_dropped(item, item.value.reason)

    def add_refused(self, item: Item, reason: str) -> None:
        """Note that a place that was read cannot be used."""
        general = re.sub(r"\b(message|event|item|step) \d+", r"\1 N", reason)
        self.by_source[item.source].refused[general] += item.num_rows
        if len(self.broken) < MAX_LISTED:
            self.broken.append(BrokenRow(file=item.file, line=item.line, reason=reason))

    def add_dropped(self, item: Item, reason: str) -> None:
        """Note that a place that was read is of no use."""
        self.by_source[item.source].dropped[reason] += item.num_rows

    def add_contaminated(self, item: Item, evaluation: tuple[str, int]) -> None:
        """Note a row that holds text of an evaluation item, given as (file, line)."""
        file, line = evaluation
        self.add_dropped(item, f"text of {file}")
        if len(self.contaminated) < MAX_LISTED:
            row = Contaminated(
                file=item.file, line=item.line, evaluation=file, evaluation_line=line
            )
            self.contaminated.append(row)

    def add_counts(self, counts: Counter[str]) -> None:
        """Add to the fields of these names."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def add_rows(
        self,
        split: str,
        kind: Kind,
        *,
        conversations: int,
        rows: int,
        tokens: int,
        supervised_tokens: int,
    ) -> None:
        """Note the written rows of one kind on one side of the split."""
        if not rows:
            return
        counts = {"train": self.train, "held_out": self.held_out}[split]
        counts.rows += rows
        counts.tokens += tokens
        counts.supervised_tokens += supervised_tokens
        counts.conversations += conversations
        self.categories[kind.category] += rows
        self.licences[kind.licence] += rows
        self.sources[kind.source] += rows
        self.by_source[kind.place].licences[kind.licence] += conversations
        if kind.teacher:
            self.teachers[kind.teacher] += rows

    def check(self, *, max_skip: float) -> None:
        """Refuse a result that stands on too few of the rows.

        Raises:
            UserError: no rows at all, more than `max_skip` of them refused, or none to train on.
        """
        if not self.rows_read:
            raise UserError(
                "rows or code files in the sources",
                f"none (files of other kinds: {sum(self.ignored_files.values())})",
                "point --source at files with rows or at a folder with code",
            )
        if self.rows_refused > max_skip * self.rows_read:
            action = "repair the rows, name their keys (--map), or raise --max-skip"
            if any(MISSING_TOOLS in counts.refused for counts in self.by_source.values()):
                action += f", or pass --allow-missing-tools to take {MISSING_TOOLS}"
            raise UserError(
                f"at most {max_skip:.1%} of rows that cannot be used",
                f"{self.rows_refused} of {self.rows_read}, the first at {self.broken[0]}",
                action,
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
            *(_source_line(name, counts) for name, counts in self.by_source.items()),
            f"rows read       {self.rows_read} ({_counts(self.formats)})",
            f"rows refused    {self.rows_refused}",
            *(f"                {row}" for row in self.broken[:MAX_SHOWN]),
            f"rows dropped    {self.dropped.total()} ({_counts(self.dropped)})",
            f"files ignored   {self.ignored_files.total()} ({_counts(self.ignored_files)})",
            f"rows cut        {self.cut_at_mismatch} before a call or a result without the other",
            f"rows split      {self.split_by_length} by length, {self.split_by_template} by the"
            f" template; {self.cut_inside_turn} cut inside a turn;"
            f" {self.windows_too_short} left out, with nothing to predict",
            f"tokens lost     {self.supervised_tokens_lost} supervised ones that fit no window;"
            f" {self.edge_tokens} over an edge",
        ]
        if self.replies_as_generated or self.replies_encoded_anew:
            lines.append(
                f"replies         {self.replies_as_generated} with the tokens that the base"
                f" generated; {self.replies_encoded_anew} encoded anew: their tokens say other text"
            )
        if self.special_tokens_spelt or self.closing_tags_in_text:
            lines.append(
                f"mentions        {self.special_tokens_spelt} special tokens in replies and"
                f" documents, encoded as text; {self.closing_tags_in_text} replies mention </think>"
            )
        for file, count in self.evaluation_items.items():
            short = self.evaluation_items_too_short.get(file, 0)
            lines.append(f"kept clean of   {file}: {count} items, {short} too short to look for")
        lines += [
            f"near-duplicates {self.near_duplicates} in {self.near_duplicate_groups} groups on one"
            f" side each, the largest of {self.largest_group}",
            f"overlap         {self.held_out_overlap:.1%} of what is trained on is held-out text",
            *(f"mix             {part}" for part in self.mix),
            *([f"secrets         {_counts(self.secrets)}"] if self.secrets else []),
        ]
        for name, counts in (("train", self.train), ("held out", self.held_out)):
            share = counts.supervised_tokens / max(counts.tokens, 1)
            lines.append(
                f"{name:15} {counts.rows} rows of {counts.conversations} conversations,"
                f" {counts.tokens} tokens, {share:.1%} supervised"
            )
        lines.append(f"categories      {_counts(self.categories)}")
        lines.append(f"licences        {_counts(self.licences)}")
        return "\n".join(lines).replace(" ()", "")

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        reasons = sum((counts.refused for counts in self.by_source.values()), Counter())
        return {
            "rows_read": self.rows_read,
            "rows_refused": self.rows_refused,
            "refused_by_reason": dict(reasons.most_common()),
            "refused": [vars(row) for row in self.broken],
            "by_source": {
                name: {**vars(counts), "rows_used": counts.rows_used}
                for name, counts in self.by_source.items()
            },
            "dropped": dict(self.dropped),
            "ignored_files": dict(self.ignored_files),
            "formats": dict(self.formats),
            "rows_by_category": dict(self.categories),
            "rows_by_licence": dict(self.licences),
            "rows_by_source": dict(self.sources),
            "rows_by_teacher": dict(self.teachers),
            "cut_at_mismatch": self.cut_at_mismatch,
            "split_by_template": self.split_by_template,
            "split_by_length": self.split_by_length,
            "windows_too_short": self.windows_too_short,
            "cut_inside_turn": self.cut_inside_turn,
            "supervised_tokens_lost": self.supervised_tokens_lost,
            "edge_tokens": self.edge_tokens,
            "special_tokens_spelt": self.special_tokens_spelt,
            "closing_tags_in_text": self.closing_tags_in_text,
            "replies_as_generated": self.replies_as_generated,
            "replies_encoded_anew": self.replies_encoded_anew,
            "contaminated": [vars(row) for row in self.contaminated],
            "secrets": dict(self.secrets),
            "evaluation_items": self.evaluation_items,
            "evaluation_items_too_short": self.evaluation_items_too_short,
            "near_duplicates": self.near_duplicates,
            "near_duplicate_groups": self.near_duplicate_groups,
            "largest_group": self.largest_group,
            "held_out_overlap": round(self.held_out_overlap, 4),
            "mix": [{**vars(part), "epochs": part.epochs} for part in self.mix],
            "train": _split_dict(self.train),
            "held_out": _split_dict(self.held_out),
        }


def _split_dict(counts: SplitCounts) -> dict[str, Any]:
    return {
        "rows": counts.rows,
        "conversations": counts.conversations,
        "tokens": counts.tokens,
        "supervised_tokens": counts.supervised_tokens,
        "supervised_share": round(counts.supervised_tokens / max(counts.tokens, 1), 4),
    }


def _source_line(name: str, counts: SourceCounts) -> str:
    left_out = counts.refused + counts.dropped
    tail = f"; not used: {_counts(left_out)}" if left_out else ""
    return f"{name}: {counts.rows_read} ({_counts(counts.formats)}){tail}"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())
