"""Text to token ids with the character positions of each, as the base's tokenizer makes them.

Two things make this faster than the plain call, and neither changes a token. Rows of one source
often begin with the same long text (instructions, tool schemas): a text may be cut behind a special
token, as tokenizers do that first, so the first part is looked up. And positions in ASCII text
follow from the lengths of byte-level tokens; Python's list of them takes longer than the encoding.
Both are used only where the tokenizer's own description and a trial allow it.

Special tokens that are only mentioned (literals.py) are spelt: encoded as the text that they are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

Encoded = tuple[np.ndarray, np.ndarray]

_MIN_OPENING = 256  # characters; a shorter one is not worth looking up
_OPENINGS_KEPT = 256
_LONG = 250_000  # characters that are encoded together
_TRIALS = ("a", " a", "\na", "Ab", "1", "é", "  \n", "")


class Encoder:
    """The Rust tokenizer behind a transformers one.

    Attributes:
        special_tokens: their texts, by id.
        can_spell: whether a text can be encoded with only some of its special tokens spelt.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        description = json.loads(tokenizer.backend_tokenizer.to_str())
        _keep_whitespace(description["post_processor"])
        self._backend = Tokenizer.from_str(json.dumps(description))
        self._backend.no_padding()
        self._backend.no_truncation()
        self.special_tokens = tuple(
            token["content"]
            for token in sorted(description["added_tokens"], key=lambda token: token["id"])
            if token["special"] and token["content"].strip()
        )
        self._lengths = _token_lengths(description)
        self._fit = self._cuts(description["added_tokens"])
        self._cut = re.compile("|".join(map(re.escape, self._fit))) if self._fit else None
        special = {token["content"] for token in description["added_tokens"] if token["special"]}
        self.can_spell = special <= set(self._fit) and all(map(self._is_spelt, special))
        self._openings: dict[str, Encoded] = {}

    def encode(self, texts: list[str]) -> list[Encoded]:
        """(ids [T] int32, character offsets [T, 2] int64) of each text, on all cores."""
        cuts = [self._place(text) for text in texts]
        heads = {text[:cut] for text, cut in zip(texts, cuts, strict=True) if cut}
        unknown = sorted(heads - self._openings.keys())
        if len(self._openings) + len(unknown) > _OPENINGS_KEPT:
            self._openings.clear()
            unknown = sorted(heads)
        rests = [self._pieces(text[cut:]) for text, cut in zip(texts, cuts, strict=True)]
        encoded = self._plain([*unknown, *itertools.chain.from_iterable(rests)])
        self._openings.update(zip(unknown, encoded, strict=False))
        following = iter(encoded[len(unknown) :])
        results = []
        for text, cut, rest in zip(texts, cuts, rests, strict=True):
            opening = [text[:cut]] if cut else []
            parts = [self._openings[head] for head in opening]
            parts += itertools.islice(following, len(rest))
            results.append(_joined([*opening, *rest], parts))
        return results

    def encode_documents(self, texts: list[str]) -> list[Encoded]:
        """As `encode`, all special tokens spelt, with those that the tokenizer puts around."""
        with self._spelling():
            return self._plain(texts, add_special_tokens=True)

    def encode_spelt(self, text: str, literals: list[tuple[int, int]]) -> Encoded:
        """As `encode` of a text whose special tokens at these positions are spelt.

        Tokenizers take special tokens out of a text first and encode what is between them, so
        that can be done apart; only where `can_spell`.
        """
        assert self._cut is not None
        spelt = set(literals)
        marks = [m.span() for m in self._cut.finditer(text) if m.span() not in spelt]
        edges = [0, *itertools.chain.from_iterable(marks), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
        with self._spelling():
            between = self._plain(pieces[::2])
        parts = [between[0]]
        for token, part in zip(self._plain(pieces[1::2]), between[1:], strict=True):
            parts += [token, part]
        return _joined(pieces, parts)

    def can_cut(self, text: str, position: int) -> bool:
        """Whether the two parts of a text have the tokens of the whole."""
        if position in (0, len(text)):
            return True
        found = self._cut.finditer(text, 0, position) if self._cut else ()
        return any(match.end() == position for match in found)

    def says(self, ids: tuple[int, ...], text: str) -> bool:
        """Whether tokens spell a text, but for whitespace that a template sets as it likes."""
        if not ids or not 0 <= min(ids) <= max(ids) < self._backend.get_vocab_size():
            return False
        spelt = self._backend.decode(list(ids), skip_special_tokens=False)
        return spelt.split() == text.split() or "".join(spelt.split()) == "".join(text.split())

    def _place(self, text: str) -> int:
        """Where to cut a text, 0 for nowhere."""
        match = self._cut.search(text, _MIN_OPENING) if self._cut else None
        return match.end() if match else 0

    def _pieces(self, text: str) -> list[str]:
        """A long text in parts with the tokens of the whole."""
        starts = [0]
        while len(text) - starts[-1] > _LONG:
            match = self._cut.search(text, starts[-1] + _LONG) if self._cut else None
            if match is None:
                break
            starts.append(match.end())
        return [text[a:b] for a, b in itertools.pairwise([*starts, len(text)])]

    @contextlib.contextmanager
    def _spelling(self) -> Iterator[None]:
        """Special tokens are text meanwhile. A second tokenizer would take as much memory again."""
        self._backend.encode_special_tokens = True
        try:
            yield
        finally:
            self._backend.encode_special_tokens = False

    def _plain(self, texts: list[str], *, add_special_tokens: bool = False) -> list[Encoded]:
        encoded: list[Encoded] = []
        first = num_characters = 0
        # What the tokenizer returns takes 60 bytes a character and more, until it is an array.
        for last, text in enumerate(texts, start=1):
            num_characters += len(text)
            if num_characters > _LONG or last == len(texts):
                some = texts[first:last]
                encodings = self._backend.encode_batch(some, add_special_tokens=add_special_tokens)
                encoded += map(self._with_offsets, some, encodings)
                first, num_characters = last, 0
        return encoded

    def _with_offsets(self, text: str, encoding: Any) -> Encoded:
        ids = np.asarray(encoding.ids, dtype=np.int32)
        if self._lengths is not None and text.isascii():
            lengths = self._lengths[ids]
            ends = np.cumsum(lengths)
            if len(ids) and ends[-1] == len(text):
                return ids, np.stack([ends - lengths, ends], axis=1)
        return ids, np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def _cuts(self, added: list[dict[str, Any]]) -> list[str]:
        """Special tokens behind which a text may be cut."""
        names = [token["content"] for token in added]
        fit = [
            token["content"]
            for token in added
            if token["special"]
            and not (token["normalized"] or token["lstrip"] or token["rstrip"])
            and not token["single_word"]
            and not any(_overlap(token["content"], other) for other in names)
        ]
        return [name for name in fit if self._stands_trial(name)]

    def _is_spelt(self, name: str) -> bool:
        """Whether the token can be avoided: some vocabularies hold its text as a word."""
        with self._spelling():
            ids = self._backend.encode(name, add_special_tokens=False).ids
        return self._backend.token_to_id(name) not in ids

    def _stands_trial(self, name: str) -> bool:
        for before in _TRIALS:
            for after in _TRIALS:
                first = before + name
                whole, head, rest = self._plain([first + after, first, after])
                joined = _joined([first, after], [head, rest])
                if not all(map(np.array_equal, whole, joined)):
                    return False
        return True


def _joined(pieces: list[str], parts: list[Encoded]) -> Encoded:
    """The tokens of a text from those of its pieces."""
    if len(parts) == 1:
        return parts[0]
    starts = itertools.accumulate((len(piece) for piece in pieces[:-1]), initial=0)
    ids = np.concatenate([ids for ids, _ in parts])
    moved = [part[1] + start for part, start in zip(parts, starts, strict=True)]
    return ids, np.concatenate(moved)


def _overlap(name: str, other: str) -> bool:
    """Whether a match of another token could hold an end or a start of this one, or all of it."""
    if name == other:
        return False
    sizes = range(1, min(len(name), len(other)) + 1)
    return name in other or any(
        other.endswith(name[:size]) or other.startswith(name[-size:]) for size in sizes
    )


def _token_lengths(description: dict[str, Any]) -> np.ndarray | None:
    """[V] int64, bytes of each token; None when tokens are not the text's bytes one by one."""
    normalizer = description["normalizer"] or {"type": "NFC"}  # which leaves ASCII as it is
    if (description["decoder"] or {}).get("type") != "ByteLevel" or normalizer["type"] != "NFC":
        return None
    if description["model"]["type"] != "BPE":
        return None
    tokens = dict(description["model"]["vocab"])  # a character stands for a byte
    tokens |= {token["content"]: token["id"] for token in description["added_tokens"]}
    lengths = np.zeros(max(tokens.values()) + 1, dtype=np.int64)
    for token, index in tokens.items():
        lengths[index] = len(token)
    for token in description["added_tokens"]:
        lengths[token["id"]] = len(token["content"].encode())
    return lengths


def _keep_whitespace(node: Any) -> None:
    """Offsets are to cover each token's whitespace too.

    Byte-level post-processors may report offsets without leading and trailing whitespace; a
    token "\\n" would then seem empty, and a token over a span's edge would seem to be inside.
    """
    if isinstance(node, dict):
        if "trim_offsets" in node:
            node["trim_offsets"] = False
        for child in node.values():
            _keep_whitespace(child)
    elif isinstance(node, list):
        for child in node:
            _keep_whitespace(child)
