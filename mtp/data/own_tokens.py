"""Rows to tokens, where some replies have the tokens that the base generated.

A text has many spellings in tokens, and a model does not always take the one that its tokenizer
would. What was generated is what is to be learned (`mtp data regenerate` keeps it), so it stands in
the row as it is, and only the text around it is encoded: before it the served prompt, as the
server encoded it.

Tokens are used only where they spell the reply that the template renders, but for whitespace. With
another tokenizer, or after a secret was masked, they don't; the text is then encoded as any other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mtp.data.encode import Encoded
from mtp.data.mask import RenderedRow, Reply
from mtp.data.render import Renderer


def encode_rows(
    rows: list[RenderedRow], renderer: Renderer
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(ids [T] int32, offsets [T, 2] int64, replies that kept their own tokens) of each row.

    The offsets of a generated token are those of its whole reply.
    """
    kept = [_replies_to_keep(row, renderer) for row in rows]
    pieces = [_text_around(row.text, replies) for row, replies in zip(rows, kept, strict=True)]
    texts = [
        text
        for row, row_pieces in zip(rows, pieces, strict=True)
        for text, _ in row_pieces
        if not row.literals
    ]
    encoded = iter(renderer.encode(texts))
    for row, row_pieces, replies in zip(rows, pieces, kept, strict=True):
        parts: list[Encoded] = []
        for number, (text, start) in enumerate(row_pieces):
            if row.literals:
                inside = [(a - start, b - start) for a, b in row.literals]
                ids, offsets = renderer.encoder.encode_spelt(text, inside)
            else:
                ids, offsets = next(encoded)
            parts.append((ids, offsets + start if start else offsets))
            parts += [_generated(reply) for reply in replies[number : number + 1]]
        ids, offsets = parts[0]
        if len(parts) > 1:
            ids = np.concatenate([part[0] for part in parts])
            offsets = np.concatenate([part[1] for part in parts])
        yield ids, offsets, len(replies)


def _replies_to_keep(row: RenderedRow, renderer: Renderer) -> list[Reply]:
    """Those whose tokens say what their text does, and behind which the text can be cut."""
    encoder = renderer.encoder
    return [
        reply
        for reply in row.replies
        if reply.token_ids
        and encoder.says(reply.token_ids, row.text[reply.start : reply.end])
        and encoder.can_cut(row.text[reply.start :], reply.end - reply.start)
    ]


def _text_around(text: str, replies: list[Reply]) -> list[tuple[str, int]]:
    """(text, where it starts) before, between and after replies: one more than those."""
    starts = [0, *(reply.end for reply in replies)]
    ends = [*(reply.start for reply in replies), len(text)]
    return [(text[start:end], start) for start, end in zip(starts, ends, strict=True)]


def _generated(reply: Reply) -> Encoded:
    ids = np.asarray(reply.token_ids, dtype=np.int32)
    return ids, np.tile(np.asarray([[reply.start, reply.end]], dtype=np.int64), (len(ids), 1))
