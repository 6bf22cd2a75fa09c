"""Token ids and positions against the plain call of the tokenizer, for texts full of markers."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from data_helpers import make_base

from mtp.data import encode
from mtp.data.render import load_tokenizer

PARTS = (
    *("<|im_start|>", "<|im_end|>", "<|im_", "end|>", "\n", "a word ", "é世", "🙂", "e\u0301"),
    *("<tool_call>", "</think>", "path " * 30, " ", "\t"),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_base(tmp_path_factory.mktemp("base") / "b", "qwen35"))


def wrapped(backend):
    return SimpleNamespace(backend_tokenizer=backend)


def some_texts(count=300):
    generator = random.Random(3)
    texts = ["".join(generator.choices(PARTS, k=generator.randrange(60))) for _ in range(count)]
    return texts + [text.encode("ascii", "ignore").decode() for text in texts]


def num_different(encoder, texts):
    """Texts whose ids or offsets are not those of the tokenizer's plain call."""
    found = encoder.encode(texts)
    plain = encoder._backend.encode_batch(texts, add_special_tokens=False)
    return sum(
        ids.tolist() != wanted.ids or list(map(tuple, offsets.tolist())) != wanted.offsets
        for (ids, offsets), wanted in zip(found, plain, strict=True)
    )


def test_ids_and_offsets_are_those_of_the_plain_call(tokenizer):
    encoder = encode.Encoder(tokenizer)
    texts = some_texts()
    assert sum(encoder._place(text) > 0 for text in texts) > 100
    assert num_different(encoder, texts) == 0
    assert num_different(encoder, texts) == 0  # now all openings are known


def test_openings_are_looked_up_and_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr(encode, "_OPENINGS_KEPT", 3)
    encoder = encode.Encoder(tokenizer)
    texts = ["".join(("x" * 300, str(n), "<|im_end|>", "tail")) for n in range(8)]
    for start in range(0, 8, 2):
        assert num_different(encoder, texts[start : start + 2]) == 0
        assert len(encoder._openings) <= 3
    assert num_different(encoder, texts) == 0


def test_long_texts_are_encoded_in_parts(tokenizer, monkeypatch):
    monkeypatch.setattr(encode, "_LONG", 100)
    encoder = encode.Encoder(tokenizer)
    texts = some_texts(100)
    assert max(len(encoder._pieces(text)) for text in texts) > 5
    assert all("".join(encoder._pieces(text)) == text for text in texts)
    assert num_different(encoder, texts) == 0
    encoder._pieces = lambda text: [text[: len(text) // 2], text[len(text) // 2 :]]
    assert num_different(encoder, texts) > 0


def test_wrong_lengths_and_wrong_cuts_are_seen(tokenizer):
    """Negative control of the comparison above."""
    encoder = encode.Encoder(tokenizer)
    encoder._lengths = encoder._lengths[::-1].copy()
    encoder._place = lambda text: len(text) // 2
    assert num_different(encoder, some_texts()) > 0


def test_no_cut_where_another_token_overlaps(tokenizer):
    from tokenizers import AddedToken, Tokenizer

    for other in ("<|im_end|>\n", "x<|im_", "|>y"):
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.add_tokens([AddedToken(other, normalized=False)])
        encoder = encode.Encoder(wrapped(backend))
        assert encoder._place("x" * 300 + "<|im_end|>") == 0
        assert num_different(encoder, [text + other for text in some_texts(50)]) == 0


def test_no_cut_where_the_tokenizer_treats_a_start_apart():
    """As SentencePiece: a space is put before the first word of a text, and no byte is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate(["?", "▁", *"abé1", "\n"])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens([AddedToken("<e>", special=True)])
    encoder = encode.Encoder(wrapped(backend))
    assert encoder._lengths is None and encoder._cut is None
    assert num_different(encoder, ["ab" * 200 + "<e>ab a", "a b", "é"]) == 0


def test_empty_texts(tokenizer):
    ids, offsets = encode.Encoder(tokenizer).encode([""])[0]
    assert ids.shape == (0,) and offsets.shape == (0, 2) and offsets.dtype == np.int64
