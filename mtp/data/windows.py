"""Cut rows to the longest length that training takes, at turn boundaries, context kept.

Each window of a conversation opens with what precedes the first reply (system text, tool
schemas, the first request) and then holds consecutive turns; a reply is supervised in exactly
one window. A window that starts with a tool result starts at its call, as context. Only where
one turn alone is too long is text cut inside a turn, and that is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtp.data.mask import RenderedRow, Reply, loss_mask, token_spans

MIN_TOKENS = 3  # a position predicts the token two further on: less has nothing to learn from


@dataclass(frozen=True, kw_only=True)
class Window:
    """A training sequence: input_ids [T] int32, loss_mask [T] bool.

    `cut_inside` tells that context or the reply itself was cut inside a turn; the counts are of
    replies that are supervised here, and of the tool calls in them.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    cut_inside: bool = False
    num_replies: int = 0
    num_replies_with_calls: int = 0


@dataclass(frozen=True, kw_only=True)
class _Span:
    cut: int
    head: int
    end: int


def conversation_windows(
    row: RenderedRow, ids: np.ndarray, offsets: np.ndarray, *, max_length: int
) -> list[Window]:
    """Windows of at most `max_length` tokens, in order; one when the row is short enough.

    Args:
        row: the rendered text with its replies.
        ids: [T] int32, its tokens.
        offsets: [T, 2] int64, their character offsets.
        max_length: tokens a window.
    """
    mask = loss_mask(offsets, row.replies)
    if len(ids) <= max_length:
        return [Window(input_ids=ids, loss_mask=mask, **_counts(row.replies))]
    opening = int(token_spans(offsets, np.asarray([row.opening]))[0])
    spans = [_in_tokens(reply, offsets, opening) for reply in row.replies]
    windows = []
    first = 0
    while first < len(spans):
        last = first
        while (
            last + 1 < len(spans) and opening + spans[last + 1].end - spans[first].cut <= max_length
        ):
            last += 1
        pieces, cut_inside = _pieces(opening, spans[first], spans[last], max_length)
        begin = spans[first - 1].end if first else 0
        # Replies of earlier windows are context here.
        own = mask & (np.arange(len(mask)) >= begin)
        windows.append(
            Window(
                input_ids=np.concatenate([ids[a:b] for a, b in pieces]),
                loss_mask=np.concatenate([own[a:b] for a, b in pieces]),
                cut_inside=cut_inside,
                **_counts(row.replies[first : last + 1]),
            )
        )
        first = last + 1
    return windows


def document_windows(ids: np.ndarray, *, max_length: int) -> Iterator[Window]:
    """Consecutive windows of a document, every token supervised."""
    for start in range(0, len(ids), max_length):
        piece = ids[start : start + max_length]
        yield Window(input_ids=piece, loss_mask=np.ones(len(piece), dtype=bool))


def _pieces(
    opening: int, first: _Span, last: _Span, max_length: int
) -> tuple[list[tuple[int, int]], bool]:
    """Token ranges that make a window, and whether one was cut inside a turn."""
    room = max_length - opening
    if last.end - first.cut <= room:
        return [(0, opening), (first.cut, last.end)], False
    # One reply is too long with its context: keep the opening and what precedes the reply most
    # closely, else only the latter, else as much of the reply as fits.
    if last.end - last.head <= room:
        return [(0, opening), (last.end - room, last.end)], True
    if last.end - last.head <= max_length:
        return [(last.end - max_length, last.end)], True
    return [(last.head, last.head + max_length)], True


def _counts(replies: tuple[Reply, ...]) -> dict[str, Any]:
    num_calling = sum(reply.num_calls > 0 for reply in replies)
    return {"num_replies": len(replies), "num_replies_with_calls": num_calling}


def _in_tokens(reply: Reply, offsets: np.ndarray, opening: int) -> _Span:
    cut, head, end = token_spans(offsets, np.asarray([reply.cut, reply.head, reply.end]))
    return _Span(cut=max(int(cut), opening), head=int(head), end=int(end))
