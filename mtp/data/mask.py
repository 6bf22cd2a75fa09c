"""Where the assistant's generated text stands in a rendered conversation, and its token mask.

The template is asked, not parsed: reply n starts where the render of the messages before it,
with the generation prompt, ends, and stops where the render that includes it ends. Nothing is
searched for in the text, so a role marker in a user's or a tool's text can't open a span. What
the generation prompt holds (the opening `<think>`, or the whole empty block with thinking off)
is never supervised, and the end-of-turn token is.

Some templates render earlier turns differently once a later one follows (they drop old
thinking). A reply is supervised only in a text that starts with the render in which it was the
last: one row carries all replies for which the final render is such a text, and the others get
rows of their own, each as the server would have seen it.

Special tokens in a reply's own text are hidden from the template, so that none of them can be taken
for an end of turn (literals.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from mtp.data.conversation import Conversation, Message, RowError
from mtp.data.render import Prefixes, Renderer

_PLAIN_NAME = re.compile(r"[\w.-]+")  # no template writes it in another way
_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*$")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A supervised turn, as character positions in its row's text.

    Args:
        cut: a turn boundary from which a window that holds the reply may start.
        head: start of the turn's header.
        start, end: the generated text, the end-of-turn token included.
        num_calls: tool calls in it.
        token_ids: its tokens as the base generated them, where that is known.
    """

    cut: int
    head: int
    start: int
    end: int
    num_calls: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RenderedRow:
    """A text with its supervised replies, that ends with message `last`.

    `opening` ends what precedes the first reply; `literals` are the places of special tokens that
    a reply only mentions, start and end.
    """

    text: str
    last: int
    opening: int
    replies: tuple[Reply, ...]
    literals: tuple[tuple[int, int], ...] = ()


@dataclass(kw_only=True)
class _Turn:
    """A reply; the render up to its end is the first `length` characters of `text`."""

    index: int
    head: int
    start: int
    end: int
    text: str
    length: int
    supervised: bool


def render_rows(conversation: Conversation, renderer: Renderer) -> list[RenderedRow]:
    """One row when the template's prefixes are stable, else as few as it forces.

    Replies before the first user message (a greeting) are context: no server generates them.

    Raises:
        RowError: the template refuses the conversation, renders a reply differently from its
            own generation prompt, or without its calls; or a special token in a reply cannot be
            kept apart.
    """
    messages = conversation.messages
    first_user = next(i for i, message in enumerate(messages) if message.role == "user")
    indices = [i for i, m in enumerate(messages) if m.role == "assistant" and i > first_user]
    hidden = renderer.literals.hide(messages, indices)
    prefixes = renderer.prefixes(hidden[: indices[-1] + 1], conversation.tools)
    opening, turns = _turns(messages, indices, prefixes, renderer.end_tokens)
    rows = _rows(conversation, opening, turns)
    if hidden is messages:
        return rows
    return [_shown(row, conversation, renderer) for row in rows]


def _turns(
    messages: tuple[Message, ...],
    indices: list[int],
    prefixes: Prefixes,
    end_tokens: tuple[str, ...],
) -> tuple[str, list[_Turn]]:
    """(what precedes the first reply, all replies in order)."""
    opening = prefixes.text(indices[0])
    prompt = prefixes.text(indices[0], generation_prompt=True)
    header = len(prompt) - len(opening) if prompt.startswith(opening) else 0
    turns: list[_Turn] = []
    for index in indices:
        turn = _turn(messages[index], index, prefixes, header, end_tokens)
        if turns and turn.text.startswith(turns[-1].text):
            # One text for all whose renders begin it: a long trace has hundreds.
            replaced = turns[-1].text
            for earlier in turns:
                earlier.text = turn.text if earlier.text is replaced else earlier.text
        turns.append(turn)
    return opening, turns


def _rows(conversation: Conversation, opening: str, turns: list[_Turn]) -> list[RenderedRow]:
    """The fewest texts that hold each supervised reply as it was when it was the last."""
    messages = conversation.messages
    pending = [turn for turn in turns if turn.supervised]
    rows = []
    while pending:
        text = pending[-1].text[: pending[-1].length]
        stable = {turn.index for turn in turns if text.startswith(turn.text[: turn.length])}
        covered = [turn for turn in pending if turn.index in stable]
        rows.append(
            RenderedRow(
                text=text[: covered[-1].end],
                last=covered[-1].index,
                opening=len(opening) if text.startswith(opening) else 0,
                replies=tuple(
                    Reply(
                        cut=_cut(conversation, turns, turn, stable),
                        head=turn.head,
                        start=turn.start,
                        end=turn.end,
                        num_calls=len(messages[turn.index].tool_calls),
                        token_ids=messages[turn.index].token_ids,
                    )
                    for turn in covered
                ),
            )
        )
        pending = [turn for turn in pending if turn.index not in stable]
    return rows[::-1]


def _shown(row: RenderedRow, conversation: Conversation, renderer: Renderer) -> RenderedRow:
    """A row whose special tokens were hidden, as the template renders it without hiding any."""
    text, literals = renderer.literals.show(row.text)
    plain = renderer.text(conversation.messages[: row.last + 1], conversation.tools)
    if not plain.startswith(text):
        raise RowError("the chat template changes a special token in the text of a reply")
    return replace(row, text=text, literals=literals)


def token_spans(offsets: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Index of the first token that starts at or after each character position.

    Args:
        offsets: [T, 2] int64, character start and end of each token.
        positions: [N] int64.
    """
    return np.searchsorted(offsets[:, 0], positions, side="left")


def loss_mask(offsets: np.ndarray, replies: tuple[Reply, ...]) -> np.ndarray:
    """[T] bool: tokens that lie wholly inside a reply's generated text.

    A token over the edge (the prompt's last newline merged with the reply's first) is not what
    the served model generates, so it stays out.
    """
    mask = np.zeros(len(offsets), dtype=bool)
    for reply in replies:
        inside = (offsets[:, 0] >= reply.start) & (offsets[:, 1] <= reply.end)
        mask |= inside & (offsets[:, 1] > offsets[:, 0])
    return mask


def num_edge_tokens(offsets: np.ndarray, replies: tuple[Reply, ...]) -> int:
    """Tokens that stand across the start of a reply, see `loss_mask`; offsets [T, 2] int64."""
    edges = np.asarray([reply.start for reply in replies])
    after = np.clip(np.searchsorted(offsets[:, 1], edges, side="right"), 0, len(offsets) - 1)
    return int((offsets[after, 0] < edges).sum())


def _turn(
    message: Message, index: int, prefixes: Prefixes, header: int, end_tokens: tuple[str, ...]
) -> _Turn:
    prompt = prefixes.text(index, generation_prompt=True)
    full = prefixes.text(index + 1)
    start = len(prompt)
    if not full.startswith(prompt):
        # With thinking off a template may leave the empty block out of what it renders.
        start = len(_EMPTY_THINKING.sub("", prompt))
        if start == len(prompt) or not full.startswith(prompt[:start]):
            raise RowError(f"message {index} does not continue the template's generation prompt")
    names = [call.name for call in message.tool_calls if _PLAIN_NAME.fullmatch(call.name)]
    if message.supervised and any(name not in full[start:] for name in names):
        raise RowError(f"message {index}: the chat template leaves its tool calls out")
    stripped = full.rstrip()
    end_token = next((token for token in end_tokens if stripped.endswith(token)), None)
    end = len(stripped) if end_token and len(stripped) > start else len(full)
    return _Turn(
        index=index,
        head=len(prompt) - header,
        start=start,
        end=end,
        text=full,
        length=len(full),
        supervised=message.supervised,
    )


def _cut(conversation: Conversation, turns: list[_Turn], turn: _Turn, stable: set[int]) -> int:
    """The nearest turn boundary before the reply that leaves no tool result without its call."""
    earlier = [other for other in turns if other.index < turn.index]
    if not earlier or earlier[-1].index not in stable:
        return 0
    previous = earlier[-1]
    follows_call = conversation.messages[previous.index + 1].role == "tool"
    return previous.head if follows_call else previous.length
