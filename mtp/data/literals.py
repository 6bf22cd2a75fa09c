"""Special tokens in a reply's own text are text: no model generated them as tokens.

A model that emits `<|im_end|>` ends its turn, and servers take other special tokens out of what
they send. A reply whose text shows one, as code about chat templates does, was spelt letter by
letter. As a special token it would end the turn in the middle and be trained on. So in supervised
replies it is encoded as letters. In all other text it stays what the server makes of it: vLLM, and
transformers unless `sanitize_control_tokens` is set, parse special tokens in users' text too.

Which of a rendered text's special tokens are the template's own, the template is asked: it renders
stand-ins of the same length, so that every position stays what it is.
"""

from __future__ import annotations

import re
from dataclasses import replace

from mtp.data.conversation import Message, RowError, ToolCall

# One character a special token, from a plane that Unicode leaves to private use.
_FIRST, _LAST = 0xF0000, 0xFFFFD
_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


class Literals:
    """Hides special tokens in replies, and shows where they were.

    Args:
        special_tokens: their texts.
        can_spell: whether the tokenizer can encode them as letters.
    """

    def __init__(self, special_tokens: tuple[str, ...], *, can_spell: bool) -> None:
        self._can_spell = can_spell
        self._stand_ins = {
            token: chr(_FIRST + index) * len(token) for index, token in enumerate(special_tokens)
        }
        self._tokens = {stand_in: token for token, stand_in in self._stand_ins.items()}
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._hidden = re.compile("|".join(self._tokens) or "(?!)")

    def count(self, text: str) -> int:
        """Special tokens in a text."""
        return sum(1 for _ in self._special.finditer(text))

    def hide(self, messages: tuple[Message, ...], indices: list[int]) -> tuple[Message, ...]:
        """The messages, stand-ins in those at `indices`; the very same object if none is needed.

        Raises:
            RowError: a reply that needs them is not to be told apart, or cannot be spelt.
        """
        hidden = {i: self._hide(messages[i]) for i in indices if messages[i].supervised}
        changed = [i for i, message in hidden.items() if message != messages[i]]
        if not changed:
            return messages
        if not self._can_spell:
            raise RowError(f"message {changed[0]} holds a special token in its text")
        if any(_PRIVATE.search(text) for i in changed for text in _texts(messages[i])):
            raise RowError(f"message {changed[0]} holds a special token and private characters")
        return tuple(hidden.get(i, message) for i, message in enumerate(messages))

    def show(self, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """(the text without stand-ins, where they were, as character positions)."""
        spans = tuple(match.span() for match in self._hidden.finditer(text))
        return self._hidden.sub(lambda match: self._tokens[match[0]], text), spans

    def _hide(self, message: Message) -> Message:
        if not any(self._special.search(text) for text in _texts(message)):
            return message
        calls = (
            ToolCall(name=self._sub(c.name), arguments=self._sub(c.arguments), id=c.id)
            for c in message.tool_calls
        )
        return replace(
            message,
            content=self._sub(message.content),
            reasoning=self._sub(message.reasoning),
            tool_calls=tuple(calls),
        )

    def _sub(self, text: str) -> str:
        return self._special.sub(lambda match: self._stand_ins[match[0]], text)


def _texts(message: Message) -> list[str]:
    """All that a model writes in a reply."""
    calls = (text for call in message.tool_calls for text in (call.name, call.arguments))
    return [message.content, message.reasoning, *calls]
