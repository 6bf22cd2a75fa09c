"""The base's own answers in place of a trace's: on-policy data for distillation.

A conversation is replayed turn by turn. Users say what they said; the assistant's turns come from
the server; a tool is never run: its recorded result is used as long as the base makes the very
calls that the trace made (names and arguments, as JSON values). From the first other call on, the
recorded results answer something else, so the conversation ends with that call. An answer that
hit the token limit is no whole turn: the conversation ends before it.

Each finished conversation is one line of `--out`, written at once; what could not be used is a
line of `OUT.log`. A run that was killed goes on from there: half a last line is cut off, finished
rows are not asked for again. The settings stand in `OUT.log` too, and must be the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from graft.errors import UserError
from mtp.data.conversation import (
    Conversation,
    Document,
    RowError,
    checked,
    cut_at_mismatch,
)
from mtp.data.replay import UnfitAnswerError, replay
from mtp.data.server import RequestRefusedError, Server, ServerGoneError
from mtp.data.sources import Item, Reading, read_source, require_sources
from mtp.progress import track

SCHEMA_VERSION = 1
LOG_SUFFIX = ".log"
_MAX_FAILURES_IN_A_ROW = 20
_LISTED = 20


@dataclass(kw_only=True)
class RegenerateReport:
    """What became of the conversations.

    Args:
        done, resumed: written by this run, found written by an earlier one.
        turns: answers of the base that were kept.
        ended: why conversations ended, by reason; "whole" for those replayed to their end.
        unusable: conversations without any answer to keep, by reason.
        failed: conversations that the server did not answer; another run asks again.
    """

    done: int = 0
    resumed: int = 0
    turns: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"schema_version": SCHEMA_VERSION, **vars(self)}

    def as_text(self) -> str:
        """For a terminal."""
        lines = [f"written   {self.done} conversations, {self.turns} turns"]
        lines += [f"resumed   {self.resumed} of an earlier run"] if self.resumed else []
        lines += [f"ended     {count} {reason}" for reason, count in self.ended.most_common()]
        lines += [f"unusable  {count} {reason}" for reason, count in self.unusable.most_common()]
        if self.failed:
            lines.append(f"failed    {len(self.failed)}, the first: {self.failed[0]}; run it again")
        return "\n".join(lines)


def regenerate(
    server: Server,
    sources: Sequence[str | Path],
    out: Path,
    *,
    sampling: dict[str, Any],
    base: dict[str, Any],
    thinking: str = "keep",
    concurrency: int = 32,
    limit: int | None = None,
    overwrite: bool = False,
) -> RegenerateReport:
    """Replay every conversation of the sources against the server.

    Args:
        server: serves the base.
        sources: what `mtp data prepare` reads; lists of prompts too.
        out: JSON Lines to write, or to go on with.
        sampling: fields of each request (temperature, max_tokens ...), recorded.
        base: what identifies the base (fingerprint, template), recorded.
        thinking: "strip" asks with `enable_thinking` false.
        concurrency: conversations at a time.
        limit: conversations at most.
        overwrite: start anew.

    Raises:
        UserError: a wrong source, no server, another run's settings, or a server that stopped
            answering.
    """
    out = Path(out)
    require_sources(sources)
    model = server.model()
    settings = {
        "schema_version": SCHEMA_VERSION,
        "model": model["id"],
        "max_model_len": model.get("max_model_len"),
        "sampling": sampling,
        "thinking": thinking,
        "base": base,
    }
    report = RegenerateReport()
    with _Journal(out, settings, overwrite=overwrite) as journal:
        pending = itertools.islice(_pending(sources, journal.finished, report), limit)
        failures = 0
        with ThreadPoolExecutor(concurrency) as pool:
            work = (
                (item, pool.submit(replay, item.value, server, settings))
                for item in track(pending, "regenerate", unit="row")
            )
            for item, future in _as_completed(work, concurrency * 2):
                failures = _note(item, future, journal, report, failures)
                if failures >= _MAX_FAILURES_IN_A_ROW:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise UserError(
                        f"answers from {server.url}",
                        f"none to the last {failures} conversations: {report.failed[-1]}",
                        "restart the server, then run the same command: it goes on from here",
                    )
    report.resumed = journal.num_found
    return report


def base_record(base: Path) -> dict[str, Any]:
    """What identifies a base: its fingerprint, tokenizer and chat template."""
    from graft.manifest import base_fingerprint
    from graft.reader import Checkpoint
    from mtp.data.render import load_tokenizer, tokenizer_fingerprint

    fingerprint = json.dumps(base_fingerprint(Checkpoint(base)), sort_keys=True, default=str)
    return {
        "fingerprint_sha256": hashlib.sha256(fingerprint.encode()).hexdigest(),
        **tokenizer_fingerprint(base, load_tokenizer(base)),
    }


def _pending(
    sources: Sequence[str | Path], finished: set[str], report: RegenerateReport
) -> Iterator[Item]:
    """Conversations that are still to be asked for, each once."""
    seen = set(finished)
    for source in sources:
        for item in read_source(source, Counter(), Reading()):
            value = item.value
            reason = ""
            if isinstance(value, Document):
                reason = "code: there is nothing to ask"
            elif not isinstance(value, Conversation):
                reason = str(getattr(value, "reason", value))
            elif item.digest in seen:
                reason = "" if item.digest in finished else "duplicate"
                if not reason:
                    continue
            elif not value.is_prompts_only:
                try:
                    fit = checked(cut_at_mismatch(value), allow_missing_tools=True)
                    item = replace(item, value=fit)
                except RowError as error:
                    reason = str(error)
            if reason:
                report.unusable[reason] += item.num_rows
                continue
            seen.add(item.digest)
            yield item


def _as_completed(
    work: Iterable[tuple[Item, Future[Any]]], num_waiting: int
) -> Iterator[tuple[Item, Future[Any]]]:
    """Finished ones as they finish, with at most `num_waiting` begun."""
    waiting: dict[Future[Any], Item] = {}
    for item, future in work:
        waiting[future] = item
        if len(waiting) >= num_waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            yield from ((waiting.pop(future), future) for future in done)
    while waiting:
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        yield from ((waiting.pop(future), future) for future in done)


def _note(
    item: Item, future: Future[Any], journal: _Journal, report: RegenerateReport, failures: int
) -> int:
    """Write what came of a conversation; the number of failures in a row."""
    try:
        row = future.result()
    except ServerGoneError as error:
        if len(report.failed) < _LISTED or failures + 1 >= _MAX_FAILURES_IN_A_ROW:
            report.failed.append(f"{item.file}:{item.line}: {error}")
        return failures + 1
    except (UnfitAnswerError, RequestRefusedError) as error:
        reason = str(error)
        report.unusable[reason] += 1
        journal.add_unusable(item.digest, reason)
        return 0
    journal.add(item.digest, row)
    report.done += 1
    report.turns += len(row["regenerated"]["turns"])
    report.ended[row["regenerated"]["ended"]] += 1
    return 0


class _Journal:
    """The rows and the log of a run, to which a later run is added.

    Args:
        finished: digests of the conversations that need no asking.
        num_found: how many of them have a row.
    """

    def __init__(self, out: Path, settings: dict[str, Any], *, overwrite: bool) -> None:
        self._paths = (out, out.with_name(out.name + LOG_SUFFIX))
        self._settings = settings
        self.finished: set[str] = set()
        self.num_found = 0
        out.parent.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for path in self._paths:
                path.unlink(missing_ok=True)
        rows, log = ([*_whole_lines(path)] for path in self._paths)
        if (rows or log) and (log[:1] != [settings]):
            raise UserError(
                f"{out} of a run with these settings",
                _difference(log[0] if log else {}, settings),
                "use another --out, the same settings, or --overwrite",
            )
        self.num_found = len(rows)
        self.finished = {row["regenerated"]["digest"] for row in rows}
        self.finished |= {entry["digest"] for entry in log[1:]}
        self._is_new = not log

    def __enter__(self) -> _Journal:
        self._rows, self._log = (path.open("a", encoding="utf-8") for path in self._paths)
        if self._is_new:
            self._write(self._log, self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._rows, self._log):
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()

    def add(self, digest: str, row: dict[str, Any]) -> None:
        """Write a finished conversation."""
        row["regenerated"]["digest"] = digest
        self._write(self._rows, row)

    def add_unusable(self, digest: str, reason: str) -> None:
        """Write that a conversation has no answer to keep."""
        self._write(self._log, {"digest": digest, "unusable": reason})

    @staticmethod
    def _write(stream: IO[str], value: dict[str, Any]) -> None:
        # One write a line: a kill leaves whole lines and at most one half.
        stream.write(json.dumps(value, ensure_ascii=False) + "\n")
        stream.flush()


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The values of a file's whole lines; half a last one is cut off the file."""
    if not path.exists():
        return
    with path.open("rb+") as stream:
        whole = 0
        for line in stream:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                yield json.loads(line)
            except ValueError as error:
                expected = f"JSON Lines of an earlier run in {path}"
                raise UserError(expected, "another file", "use another --out") from error
        stream.truncate(whole)


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    names = [name for name in wanted if found.get(name) != wanted[name]]
    if not isinstance(found, dict) or "sampling" not in found:
        return "a file without such a run's log"
    return ", ".join(f"{n}: {json.dumps(found.get(n))[:80]}" for n in names)
