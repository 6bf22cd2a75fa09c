"""`mtp data prepare`: conversations and code in, a folder of token ids with loss masks out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graft.errors import UsageError
from graft.staging import staged_folder
from mtp.data.conversation import UNKNOWN_LICENCE, Conversation, Document, printable
from mtp.data.decontaminate import read_evaluation_sets
from mtp.data.dedup import DigestSet
from mtp.data.filters import RowFilter, require_applied
from mtp.data.formats import recogniser
from mtp.data.hub import HUB_PREFIX
from mtp.data.mix import checked_weights
from mtp.data.plain_tokenizer import PlainTokenizer
from mtp.data.render import load_tokenizer, tokenizer_fingerprint
from mtp.data.report import PrepareReport
from mtp.data.secrets import SCAN, require_scanner
from mtp.data.selection import NEAR_DUPLICATES, Collected, Rules
from mtp.data.sources import Item, Reading, read_source, require_sources
from mtp.data.store import MANIFEST, write_manifest
from mtp.data.windows import MIN_TOKENS
from mtp.data.work import Job, Outcome, Worker, work_on
from mtp.progress import track
from mtp.recipe import MixRecipe

PROMPTS_ONLY = "prompts only"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the rows, recorded in data.json.

    Args:
        max_length: longest row in tokens.
        held_out_percent: share of conversations kept for evaluation.
        seed: decides which ones, and the order in which a mix takes them.
        max_skip: largest share of rows that may be unusable.
        thinking: "keep" or "strip", see `Renderer`.
        allow_missing_tools: accept tool calls in rows without tool schemas.
        default_licence: for rows and files that do not state one.
        format_name: read all rows by this format instead of recognising theirs.
        mapping: keys of prompt and response, see `mtp.data.formats.recogniser`.
        where: conditions on the rows' fields, see `RowFilter`.
        near_duplicates: "together" keeps them on one side of the split, "drop" keeps the first
            of a group, "ignore" does not look for them, nor for held-out text in training rows.
        decontaminate: files of evaluation sets; rows that hold text of theirs are left out.
        mix: weights and budget of the training side.
        scan: "mask" or "drop" what holds keys, passwords or addresses, see `mtp.data.secrets`.
    """

    max_length: int = 4096
    held_out_percent: int = 5
    seed: int = 0
    max_skip: float = 0.01
    thinking: str = "keep"
    allow_missing_tools: bool = False
    default_licence: str = UNKNOWN_LICENCE
    format_name: str | None = None
    mapping: str | None = None
    where: Sequence[str] = ()
    near_duplicates: str = "together"
    decontaminate: Sequence[str | Path] = ()
    mix: MixRecipe = field(default_factory=MixRecipe)
    scan: str | None = None

    def __post_init__(self) -> None:
        if self.max_length < MIN_TOKENS:
            found = str(self.max_length)
            raise UsageError(f"--max-length of at least {MIN_TOKENS}", found, "raise it")
        if not 0 <= self.held_out_percent < 100:
            found = str(self.held_out_percent)
            raise UsageError("a held-out percentage from 0 to 99", found, "change it")
        if not 0 <= self.max_skip <= 1:
            raise UsageError("--max-skip from 0 to 1 (a share)", str(self.max_skip), "change it")
        if self.near_duplicates not in NEAR_DUPLICATES:
            expected = f"--near-duplicates {', '.join(NEAR_DUPLICATES)}"
            raise UsageError(expected, repr(self.near_duplicates), "change it")
        checked_weights(self.mix.weights)
        if self.scan is not None:
            if self.scan not in SCAN:
                raise UsageError(f"--scan {' or '.join(SCAN)}", repr(self.scan), "change it")
            require_scanner()

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        files = [printable(str(file)) for file in self.decontaminate]
        return asdict(self) | {"where": list(self.where), "decontaminate": files}


def prepare(
    base: Path,
    sources: Sequence[str | Path],
    out: Path,
    *,
    overwrite: bool = False,
    num_workers: int | None = None,
    **settings: Any,
) -> PrepareReport:
    """Render, tokenise, mask, window and split the sources; see data.json for what happened.

    Args:
        base: the base model, for its tokenizer and chat template.
        sources: files or folders of conversations and code, or `hub:` data sets.
        out: the folder to write, readable by `mtp.data.store.load_prepared`.
        overwrite: replace an existing `out`.
        num_workers: processes; None takes all cores. It changes nothing in the rows.
        settings: the fields of `Settings`.

    Raises:
        UserError: for a wrong setting, base or source, or too many unusable rows.
    """
    base, out = Path(base), Path(out)
    chosen = Settings(**settings)
    reading = Reading(
        recogniser=recogniser(chosen.format_name, chosen.mapping),
        filters=tuple(map(RowFilter, chosen.where)),
    )
    local = [Path(source) for source in sources if not str(source).startswith(HUB_PREFIX)]
    require_sources(sources)
    report = PrepareReport()
    tokenizer = load_tokenizer(base)
    job = _job(tokenizer, chosen, report)
    with staged_folder(out, overwrite=overwrite, sources=[base, *local], mark=MANIFEST) as staging:
        worker = Worker(job)
        collected = Collected(staging / ".rows", _rules(chosen))
        try:
            items = track(_usable(sources, reading, report), "prepare", unit="row")
            for item, outcome in work_on(items, job, worker, num_workers=num_workers):
                if _is_used(item, outcome, report):
                    licence = item.value.licence
                    licence = chosen.default_licence if licence == UNKNOWN_LICENCE else licence
                    collected.add(item, licence, outcome)
            copies = collected.deal(report)
            report.check(max_skip=chosen.max_skip)
            require_applied(reading.filters)
            collected.save(staging, copies)
        finally:
            collected.close()
        write_manifest(
            staging,
            {
                **tokenizer_fingerprint(base, tokenizer),
                "settings": chosen.as_dict(),
                "licences": sorted(report.licences),
                "report": report.as_dict(),
            },
        )
    return report


def _is_used(item: Item, outcome: Outcome, report: PrepareReport) -> bool:
    """Whether a row is trained or evaluated on; the report gets to know why not."""
    report.secrets += outcome.secrets
    if outcome.contaminated_by is not None:
        report.add_contaminated(item, outcome.contaminated_by)
    elif outcome.dropped:
        report.add_dropped(item, outcome.dropped)
    elif outcome.refused:
        report.add_refused(item, outcome.refused)
    else:
        report.add_counts(outcome.counts)
        return True
    return False


def _job(tokenizer: Any, settings: Settings, report: PrepareReport) -> Job:
    evaluation = read_evaluation_sets(settings.decontaminate)
    report.evaluation_items = dict(evaluation.num_items)
    report.evaluation_items_too_short = dict(evaluation.num_too_short)
    return Job(
        tokenizer=PlainTokenizer.of(tokenizer),
        thinking=settings.thinking,
        max_length=settings.max_length,
        allow_missing_tools=settings.allow_missing_tools,
        find_groups=settings.near_duplicates != "ignore",
        evaluation=evaluation,
        scan=settings.scan,
    )


def _rules(settings: Settings) -> Rules:
    return Rules(
        held_out_percent=settings.held_out_percent,
        seed=settings.seed,
        near_duplicates=settings.near_duplicates,
        mix=settings.mix,
    )


def _usable(
    sources: Sequence[str | Path], reading: Reading, report: PrepareReport
) -> Iterator[Item]:
    """Items that can be rendered; all others are noted in the report."""
    seen = DigestSet()
    for source in sources:
        for item in read_source(source, report.ignored_files, reading):
            report.add_read(item)
            if not isinstance(item.value, Conversation | Document):
                continue
            if isinstance(item.value, Document) and not item.value.text.strip():
                report.add_dropped(item, "empty")
            elif isinstance(item.value, Conversation) and item.value.is_prompts_only:
                report.add_dropped(item, PROMPTS_ONLY)
            elif seen.add(item.digest):
                yield item
            else:
                report.add_dropped(item, "duplicate")
