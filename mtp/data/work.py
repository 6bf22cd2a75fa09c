"""What becomes of one row: rendered, tokenised, masked, windowed; on as many cores as there are.

A worker process has its own tokenizer and template, so that jinja too runs on all cores (the
tokenizers library only spreads the tokenising). Results come back in the order of the rows, so
the number of workers changes nothing in them.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import numpy as np

from mtp.data.conversation import Conversation, Document, RowError, checked, cut_at_mismatch
from mtp.data.decontaminate import EvaluationSets
from mtp.data.dedup import beginning_keys, group_keys
from mtp.data.formats.fields import CLOSE_TAG
from mtp.data.mask import RenderedRow, loss_mask, num_edge_tokens, render_rows
from mtp.data.own_tokens import encode_rows
from mtp.data.plain_tokenizer import PlainTokenizer
from mtp.data.render import Renderer
from mtp.data.secrets import masked
from mtp.data.windows import Window, conversation_windows, document_windows

_ITEMS_AT_ONCE, _CHARACTERS_AT_ONCE = 64, 1_000_000
_BATCHES_BEFORE_WORKERS = 8  # starting a process takes as long as some hundred rows
_BATCHES_WAITING = 3  # for each worker

Value = Conversation | Document


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all workers need to know."""

    tokenizer: PlainTokenizer
    thinking: str
    max_length: int
    allow_missing_tools: bool
    find_groups: bool
    evaluation: EvaluationSets
    scan: str | None = None


@dataclass(kw_only=True)
class Outcome:
    """What a row became.

    Args:
        refused: why it cannot be used, "" if it can.
        secrets: how many were found, by kind; only when they are looked for.
        dropped: why it is of no use, "" if it is.
        contaminated_by: (file, line) of an evaluation item that it holds text of.
        keys: for `mtp.data.dedup`, None when no groups are looked for.
        beginnings: for `mtp.data.dedup`, of a conversation.
        windows: its training sequences.
        counts: added to the fields of the same name of `PrepareReport`.
    """

    refused: str = ""
    secrets: Counter[str] = field(default_factory=Counter)
    dropped: str = ""
    contaminated_by: tuple[str, int] | None = None
    keys: np.ndarray | None = None
    beginnings: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    windows: list[Window] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Worker:
    """Works on batches of rows in this process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._renderer = Renderer(job.tokenizer, thinking=job.thinking)

    def work(self, batch: list[Value]) -> list[Outcome]:
        """One outcome a row, in order."""
        outcomes = [Outcome() for _ in batch]
        rendered: list[tuple[Outcome, RenderedRow]] = []
        documents: list[tuple[Outcome, Document]] = []
        for value, outcome in zip(batch, outcomes, strict=True):
            outcome.contaminated_by = self._job.evaluation.match(value)
            if outcome.contaminated_by is not None:
                continue
            if self._job.scan is not None:
                value, outcome.secrets = masked(value)
                if outcome.secrets and self._job.scan == "drop":
                    outcome.dropped = "holds a secret"
                    continue
            if isinstance(value, Document):
                documents.append((outcome, value))
            else:
                rendered.extend((outcome, row) for row in self._render(value, outcome))
            if self._job.find_groups and not outcome.refused:
                outcome.keys = group_keys(value)
        self._tokenise(rendered, documents)
        return outcomes

    def _render(self, value: Conversation, outcome: Outcome) -> list[RenderedRow]:
        try:
            matched = cut_at_mismatch(value)
            allow = self._job.allow_missing_tools
            conversation = checked(matched, allow_missing_tools=allow)
            rows = render_rows(conversation, self._renderer)
        except RowError as error:
            outcome.refused = str(error)
            return []
        outcome.beginnings = beginning_keys(matched)
        outcome.counts["closing_tags_in_text"] += sum(
            message.role == "assistant" and CLOSE_TAG in message.content
            for message in conversation.messages
        )
        outcome.counts["cut_at_mismatch"] += len(matched.messages) < len(value.messages)
        outcome.counts["split_by_template"] += len(rows) - 1
        return rows

    def _tokenise(
        self,
        rendered: list[tuple[Outcome, RenderedRow]],
        documents: list[tuple[Outcome, Document]],
    ) -> None:
        max_length = self._job.max_length
        encoded = encode_rows([row for _, row in rendered], self._renderer)
        for (outcome, row), (ids, offsets, num_own) in zip(rendered, encoded, strict=True):
            num_known = sum(bool(reply.token_ids) for reply in row.replies)
            outcome.counts["replies_as_generated"] += num_own
            outcome.counts["replies_encoded_anew"] += num_known - num_own
            windows = conversation_windows(row, ids, offsets, max_length=max_length)
            lost = int(loss_mask(offsets, row.replies).sum())
            outcome.counts["supervised_tokens_lost"] += lost - sum(
                int(window.loss_mask.sum()) for window in windows
            )
            outcome.counts["special_tokens_spelt"] += len(row.literals)
            outcome.counts["edge_tokens"] += num_edge_tokens(offsets, row.replies)
            outcome.counts["split_by_length"] += len(windows) - 1
            self._keep(windows, outcome)
        texts = [document.text for _, document in documents]
        encoded_documents = self._renderer.encoder.encode_documents(texts)
        for (outcome, document), (ids, _) in zip(documents, encoded_documents, strict=True):
            outcome.counts["special_tokens_spelt"] += self._renderer.literals.count(document.text)
            windows = list(document_windows(ids, max_length=max_length))
            outcome.counts["split_by_length"] += max(len(windows) - 1, 0)
            self._keep(windows, outcome)

    @staticmethod
    def _keep(windows: list[Window], outcome: Outcome) -> None:
        for window in windows:
            if not window.loss_mask[2:].any():
                # The first prediction is of the third token, so this row teaches nothing.
                outcome.counts["windows_too_short"] += 1
                outcome.counts["supervised_tokens_lost"] += int(window.loss_mask.sum())
                continue
            outcome.counts["cut_inside_turn"] += window.cut_inside
            # Arrays of their own: a slice would take the whole row along to another process.
            whole = replace(window, input_ids=window.input_ids.copy())
            outcome.windows.append(whole)


def work_on(
    items: Iterable[Any], job: Job, worker: Worker, *, num_workers: int | None
) -> Iterator[tuple[Any, Outcome]]:
    """(item, outcome) in order; items have their row in `value`.

    Args:
        items: read as they are needed.
        job: what `worker` was made with.
        worker: works until it is worth to start processes.
        num_workers: processes; None takes as many as this one may use cores.
    """
    num_workers = num_workers or len(os.sched_getaffinity(0))
    batches = _batches(items)
    alone = _BATCHES_BEFORE_WORKERS if num_workers > 1 else None
    for batch in itertools.islice(batches, alone):
        yield from zip(batch, worker.work(_values(batch)), strict=True)
    following = next(batches, None)
    if following is None:
        return
    batches = itertools.chain([following], batches)
    # Forked from a process that has imported all this once, and has no threads yet.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.utils.chat_template_utils"])
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start, initargs=(job,)
    ) as pool:
        waiting: deque[tuple[list[Any], Future[list[Outcome]]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_work, _values(batch))))
                if len(waiting) >= num_workers * _BATCHES_WAITING:
                    done, future = waiting.popleft()
                    yield from zip(done, future.result(), strict=True)
            for done, future in waiting:
                yield from zip(done, future.result(), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Few rows at a time, and fewer long ones: their tokens are in memory together."""
    batch: list[Any] = []
    num_characters = 0
    for item in items:
        batch.append(item)
        num_characters += _num_characters(item.value)
        if len(batch) == _ITEMS_AT_ONCE or num_characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _num_characters(value: Value) -> int:
    if isinstance(value, Document):
        return len(value.text)
    said = sum(len(message.content) + len(message.reasoning) for message in value.messages)
    calls = sum(len(call.arguments) for message in value.messages for call in message.tool_calls)
    return said + calls + sum(map(len, value.tools))


def _values(batch: list[Any]) -> list[Value]:
    return [item.value for item in batch]


_worker: Worker | None = None  # of this process, when it is one of the pool


def _start(job: Job) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are taken by the other workers
    _worker = Worker(job)


def _work(batch: list[Value]) -> list[Outcome]:
    assert _worker is not None
    return _worker.work(batch)
