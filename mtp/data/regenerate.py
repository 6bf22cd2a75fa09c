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
    Message,
    RowError,
    ToolCall,
    checked,
    cut_at_mismatch,
    has_call_in_text,
)
from mtp.data.server import RequestRefusedError, Server, ServerGoneError
from mtp.data.sources import Item, Reading, read_source
from mtp.progress import track

SCHEMA_VERSION = 1
LOG_SUFFIX = ".log"
_MAX_FAILURES_IN_A_ROW = 20
_LISTED = 20


class UnfitAnswerError(Exception):
    """An answer that must not be learned from; its text is the reason."""


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
        UserError: no server, another run's settings, or a server that stopped answering.
    """
    out = Path(out)
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


def replay(conversation: Any, server: Server, settings: dict[str, Any]) -> dict[str, Any]:
    """The row of a replayed `Conversation`.

    Raises:
        UnfitAnswerError: not even the first answer can be kept.
        RequestRefusedError, ServerGoneError: as `Server.complete`.
    """
    messages: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    ended = "whole"
    for recorded, results in _steps(conversation):
        if recorded is not None and (recorded.role != "assistant" or not recorded.supervised):
            messages.append(_as_dict(recorded))
            messages += map(_as_dict, results)
            continue
        try:
            choice = server.complete(_request(messages, conversation.tools, settings))
            message = _kept(choice)
        except (UnfitAnswerError, RequestRefusedError) as error:
            if not turns:
                raise
            ended = str(error)
            break
        messages.append(message)
        prompt = choice["prompt_token_ids"]
        turns.append(
            {
                "finish_reason": choice["finish_reason"],
                "token_ids": choice["token_ids"],
                "num_prompt_tokens": len(prompt) if prompt else None,
            }
        )
        ended = _parting(message, recorded)
        if ended != "whole":
            break
        messages += _answered(message.get("tool_calls", []), results, recorded)
    return _row(conversation, messages, turns, ended, settings)


def _steps(conversation: Conversation) -> Iterator[tuple[Message | None, list[Message]]]:
    """Turns with the tool results after each; None is an answer that no one recorded.

    A greeting before the first request is marked as context: no server generates it.
    """
    said = conversation.messages
    asked = False
    for position, message in enumerate(said):
        if message.role == "tool":
            continue
        asked |= message.role == "user"
        if message.role == "assistant" and not asked:
            message = replace(message, supervised=False)
        after = itertools.takewhile(lambda m: m.role == "tool", said[position + 1 :])
        yield message, list(after)
        if conversation.is_prompts_only and message.role == "user":
            yield None, []


def _parting(message: dict[str, Any], recorded: Message | None) -> str:
    """Why the trace's next turns do not follow from this answer, or "whole" when they do."""
    calls = [
        (call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]
    wanted = recorded.tool_calls if recorded is not None else ()
    if calls != [(call.name, _canonical(call.arguments)) for call in wanted]:
        if calls:
            return "at a call that the trace did not make"
        return "at an answer where the trace made a call"
    # A call in plain text: what follows is its result, whatever the role.
    texts = (message["content"], recorded.content if recorded is not None else "")
    if any(map(has_call_in_text, texts)) and texts[0] != texts[1]:
        return "at a call in its text that the trace did not make"
    return "whole"


def _as_dict(message: Message) -> dict[str, Any]:
    """A turn as the trace has it."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "assistant":
        turn["weight"] = 0
    return turn


def _request(
    messages: list[dict[str, Any]], tools: tuple[str, ...], settings: dict[str, Any]
) -> dict[str, Any]:
    request = {
        "model": settings["model"],
        "messages": [{k: v for k, v in m.items() if k != "weight"} for m in messages],
        "chat_template_kwargs": {"enable_thinking": settings["thinking"] == "keep"},
        "return_token_ids": True,  # vLLM's; others ignore it
        **settings["sampling"],
    }
    if tools:
        request["tools"] = [json.loads(tool) for tool in tools]
    return request


def _kept(choice: dict[str, Any]) -> dict[str, Any]:
    """The answer as a message of the row.

    Raises:
        UnfitAnswerError: it was cut off, is empty, or holds calls that nobody parsed.
    """
    message = choice["message"]
    content = message.get("content") or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    if choice["finish_reason"] not in ("stop", "tool_calls"):
        raise UnfitAnswerError(f"cut off ({choice['finish_reason']})")
    if not reasoning and "</think>" in content:
        # A server without a reasoning parser; the template itself opens the thinking.
        reasoning, _, content = content.partition("</think>")
        reasoning = reasoning.removeprefix("<think>")
    calls: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        if not isinstance(_parsed(function.get("arguments") or "{}"), dict):
            raise UnfitAnswerError("a call whose arguments are no JSON object")
        calls.append(
            {
                "id": call.get("id") or f"call_{len(calls)}",
                "type": "function",
                "function": {
                    "name": function.get("name", ""),
                    "arguments": function.get("arguments") or "{}",
                },
            }
        )
    if not calls and "<tool_call>" in content:
        raise UnfitAnswerError("a call that the server did not parse (--tool-call-parser)")
    if not (content.strip() or calls):
        # The template would close the thinking, which the base did not.
        raise UnfitAnswerError("thinking without an answer" if reasoning.strip() else "empty")
    kept = {"role": "assistant", "content": content.strip()}
    if reasoning.strip():
        kept["reasoning_content"] = reasoning.strip()
    return kept | ({"tool_calls": calls} if calls else {})


def _canonical(text: Any) -> str:
    """JSON text by its value; 1 and true differ here, as Python values they do not."""
    return json.dumps(_parsed(text), sort_keys=True)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return None


def _answered(
    calls: list[dict[str, Any]], results: list[Message], recorded: Message | None
) -> Iterator[dict[str, Any]]:
    """The recorded results as answers to the base's calls, by id or else by order."""
    wanted: tuple[ToolCall, ...] = recorded.tool_calls if recorded is not None else ()
    new_ids = {old.id: call["id"] for old, call in zip(wanted, calls, strict=True) if old.id}
    for number, result in enumerate(results):
        by_order = calls[number]["id"] if number < len(calls) else ""
        answered = new_ids.get(result.tool_call_id, by_order)
        yield {"role": "tool", "content": result.content, "tool_call_id": answered}


def _row(
    conversation: Conversation,
    messages: list[dict[str, Any]],
    turns: list[dict[str, Any]],
    ended: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return {
        "id": conversation.id,
        "source": conversation.source,
        "license": conversation.licence,
        "messages": messages[: last + 1],
        "tools": [json.loads(tool) for tool in conversation.tools],
        "model": settings["model"],
        "regenerated": {"ended": ended, "turns": turns},
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
