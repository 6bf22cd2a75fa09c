"""`mtp data prepare`: conversations and code in, a folder of token ids with loss masks out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from graft.errors import UserError
from graft.staging import staged_folder
from mtp.data.conversation import (
    UNKNOWN_LICENCE,
    Conversation,
    Document,
    RowError,
    checked,
    cut_at_mismatch,
)
from mtp.data.filters import RowFilter, require_applied
from mtp.data.formats import recogniser
from mtp.data.hub import HUB_PREFIX
from mtp.data.mask import RenderedRow, loss_mask, num_edge_tokens, render_rows
from mtp.data.render import Renderer, load_tokenizer, tokenizer_fingerprint
from mtp.data.report import PrepareReport
from mtp.data.sources import Item, Reading, read_source
from mtp.data.split import is_held_out
from mtp.data.store import RowWriter, write_manifest
from mtp.data.windows import MIN_TOKENS, Window, conversation_windows, document_windows
from mtp.progress import track

_ITEMS_AT_ONCE = 64
PROMPTS_ONLY = "prompts only"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the rows, recorded in data.json."""

    max_length: int
    held_out_percent: int
    seed: int
    max_skip: float
    thinking: str
    allow_missing_tools: bool
    default_licence: str
    format: str | None
    map: str | None
    where: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.max_length < MIN_TOKENS:
            found = str(self.max_length)
            raise UserError(f"--max-length of at least {MIN_TOKENS}", found, "raise it")
        if not 0 <= self.held_out_percent < 100:
            found = str(self.held_out_percent)
            raise UserError("a held-out percentage from 0 to 99", found, "change it")
        if not 0 <= self.max_skip <= 1:
            raise UserError("--max-skip from 0 to 1 (a share)", str(self.max_skip), "change it")


def prepare(
    base: Path,
    sources: Sequence[str | Path],
    out: Path,
    *,
    max_length: int = 4096,
    held_out_percent: int = 5,
    seed: int = 0,
    max_skip: float = 0.01,
    thinking: str = "keep",
    allow_missing_tools: bool = False,
    default_licence: str = UNKNOWN_LICENCE,
    format_name: str | None = None,
    mapping: str | None = None,
    where: Sequence[str] = (),
    overwrite: bool = False,
) -> PrepareReport:
    """Render, tokenise, mask, window and split the sources; see data.json for what happened.

    Args:
        base: the base model, for its tokenizer and chat template.
        sources: files or folders of conversations and code, or `hub:` data sets.
        out: the folder to write, readable by `mtp.data.store.load_prepared`.
        max_length: longest row in tokens.
        held_out_percent: share of conversations kept for evaluation.
        seed: decides which ones.
        max_skip: largest share of rows that may be unusable.
        thinking: "keep" or "strip", see `Renderer`.
        allow_missing_tools: accept tool calls in rows without tool schemas.
        default_licence: for rows and files that do not state one.
        format_name: read all rows by this format instead of recognising theirs.
        mapping: keys of prompt and response, see `mtp.data.formats.recogniser`.
        where: conditions on the rows' fields, see `RowFilter`.
        overwrite: replace an existing `out`.

    Raises:
        UserError: for a wrong setting, base or source, or too many unusable rows.
    """
    base = Path(base)
    settings = Settings(
        max_length=max_length,
        held_out_percent=held_out_percent,
        seed=seed,
        max_skip=max_skip,
        thinking=thinking,
        allow_missing_tools=allow_missing_tools,
        default_licence=default_licence,
        format=format_name,
        map=mapping,
        where=tuple(where),
    )
    reading = Reading(
        recogniser=recogniser(format_name, mapping), filters=tuple(map(RowFilter, where))
    )
    local = [Path(source) for source in sources if not str(source).startswith(HUB_PREFIX)]
    if not sources:
        raise UserError("at least one source", "none", "pass --source")
    report = PrepareReport()
    with staged_folder(Path(out), overwrite=overwrite, sources=[base, *local]) as staging:
        tokenizer = load_tokenizer(base)
        renderer = Renderer(tokenizer, thinking=thinking)
        writer = RowWriter(staging / ".rows")
        try:
            items = _usable(sources, reading, report)
            stream = iter(track(items, "prepare", unit="row"))
            while batch := list(islice(stream, _ITEMS_AT_ONCE)):
                _write_batch(batch, renderer, settings, report, writer)
            report.check(max_skip=max_skip)
            require_applied(reading.filters)
            writer.save(staging)
        finally:
            writer.close()
        write_manifest(
            staging,
            {
                **tokenizer_fingerprint(base, tokenizer),
                "settings": vars(settings),
                "licences": sorted(report.licences),
                "report": report.as_dict(),
            },
        )
    return report


def _usable(
    sources: Sequence[str | Path], reading: Reading, report: PrepareReport
) -> Iterator[Item]:
    """Items that can be rendered; all others are noted in the report."""
    seen: set[bytes] = set()
    for source in sources:
        for item in read_source(source, report.ignored_files, reading):
            report.add_read(item)
            if not isinstance(item.value, Conversation | Document):
                continue
            digest = bytes.fromhex(item.digest)[:16]
            if digest in seen:
                report.add_dropped(item, "duplicate")
            elif isinstance(item.value, Document) and not item.value.text.strip():
                report.add_dropped(item, "empty")
            elif isinstance(item.value, Conversation) and item.value.is_prompts_only:
                report.add_dropped(item, PROMPTS_ONLY)
            else:
                seen.add(digest)
                yield item


def _write_batch(
    batch: list[Item],
    renderer: Renderer,
    settings: Settings,
    report: PrepareReport,
    writer: RowWriter,
) -> None:
    for value, windows in _windows(batch, renderer, settings, report):
        if value.licence == UNKNOWN_LICENCE:
            value = replace(value, licence=settings.default_licence)
        held_out = is_held_out(value.id, seed=settings.seed, percent=settings.held_out_percent)
        counts = report.held_out if held_out else report.train
        for window in windows:
            if not window.loss_mask[2:].any():
                # The first prediction is of the third token, so this row teaches nothing.
                report.windows_too_short += 1
                report.supervised_tokens_lost += int(window.loss_mask.sum())
                continue
            report.add_row(counts, window.loss_mask, value)
            report.cut_inside_turn += window.cut_inside
            writer.add(
                "held_out" if held_out else "train",
                input_ids=window.input_ids,
                loss_mask=window.loss_mask,
                category=value.category,
                conversation_id=value.id,
                source=value.source,
            )


def _windows(
    batch: list[Item], renderer: Renderer, settings: Settings, report: PrepareReport
) -> Iterator[tuple[Conversation | Document, list[Window]]]:
    """Each conversation or document of the batch with its windows."""
    rendered: list[tuple[Conversation, RenderedRow]] = []
    documents: list[Document] = []
    for item in batch:
        if isinstance(item.value, Document):
            documents.append(item.value)
        elif isinstance(item.value, Conversation):
            try:
                matched = cut_at_mismatch(item.value)
                conversation = checked(matched, allow_missing_tools=settings.allow_missing_tools)
                rows = render_rows(conversation, renderer)
            except RowError as error:
                report.add_refused(item, str(error))
                continue
            report.cut_at_mismatch += len(matched.messages) < len(item.value.messages)
            report.split_by_template += len(rows) - 1
            rendered.extend((conversation, row) for row in rows)
    encoded = renderer.encode([row.text for _, row in rendered], add_special_tokens=False)
    for (conversation, row), (ids, offsets) in zip(rendered, encoded, strict=True):
        windows = conversation_windows(row, ids, offsets, max_length=settings.max_length)
        mask = loss_mask(offsets, row.replies)
        kept = sum(int(window.loss_mask.sum()) for window in windows)
        report.supervised_tokens_lost += int(mask.sum()) - kept
        report.edge_tokens += num_edge_tokens(offsets, row.replies)
        report.split_by_length += len(windows) - 1
        yield conversation, windows
    texts = [document.text for document in documents]
    for document, (ids, _) in zip(
        documents, renderer.encode(texts, add_special_tokens=True), strict=True
    ):
        windows = list(document_windows(ids, max_length=settings.max_length))
        report.split_by_length += max(len(windows) - 1, 0)
        yield document, windows
