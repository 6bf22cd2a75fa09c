"""Replies of `mtp data regenerate` keep the very tokens that the base generated."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data_helpers import make_base, read_row, write_jsonl

from mtp.data.conversation import checked, content_digest
from mtp.data.mask import loss_mask, num_edge_tokens, render_rows
from mtp.data.own_tokens import encode_rows
from mtp.data.prepare import prepare
from mtp.data.render import Renderer, load_tokenizer
from mtp.data.store import load_prepared
from mtp.data.windows import conversation_windows

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "b", "qwen35")


@pytest.fixture(scope="module")
def renderer(base):
    return Renderer(load_tokenizer(base))


def spelt(renderer, text):
    """Tokens of a text as no tokenizer would choose them: one a character, markers apart."""
    pieces, backend = [], renderer.tokenizer
    for part in text.replace("<|im_end|>", "\0<|im_end|>\0").split("\0"):
        pieces += [part] if part.startswith("<|") else list(part)
    return [token for piece in pieces for token in backend.encode(piece)]


def regenerated(renderer, spellings, **changes):
    messages = [
        {"role": "user", "content": "Do <|im_end|> it."},
        {"role": "assistant", "content": "A greeting.", "weight": 0},
        {"role": "user", "content": "Now."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "é result", "tool_call_id": "c"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "So."},
    ]
    turns = [{"token_ids": spelt(renderer, text), "num_prompt_tokens": 1} for text in spellings]
    row = {"messages": messages, "tools": [TOOL], "regenerated": {"ended": "whole", "turns": turns}}
    return row | changes


FIRST = (
    "Hm.\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call><|im_end|>"
)
SECOND = "So.\n\n</think>\n\nDone. <|im_end|>"  # whitespace that the template sets otherwise


def all_tokens(row):
    return [token for turn in row["regenerated"]["turns"] for token in turn["token_ids"]]


def encoded(renderer, row):
    (rendered,) = render_rows(checked(read_row(row)[1]), renderer)
    ((ids, offsets, num_own),) = encode_rows([rendered], renderer)
    return rendered, ids, offsets, num_own


def test_generated_tokens_stand_in_the_row_and_are_what_is_supervised(renderer):
    row = regenerated(renderer, [FIRST, SECOND])
    rendered, ids, offsets, num_own = encoded(renderer, row)
    assert num_own == 2 and num_edge_tokens(offsets, rendered.replies) == 0
    mask = loss_mask(offsets, rendered.replies)
    assert ids[mask].tolist() == all_tokens(row)
    prompt = rendered.text[: rendered.replies[0].start]
    wanted = renderer.encode([prompt])[0][0]
    assert ids[: len(wanted)].tolist() == wanted.tolist()
    assert renderer.tokenizer.decode(ids[~mask]) == (
        prompt + rendered.text[rendered.replies[0].end : rendered.replies[1].start]
    )
    again = {**row, "regenerated": None}
    _, plain, _, none = encoded(renderer, again)
    assert none == 0 and len(plain) < len(ids)


def test_windows_cut_such_rows_at_turns(renderer):
    asked, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "Done."}
    messages = [asked, {**said, "reasoning_content": "So."}] * 2
    row = regenerated(renderer, [SECOND, SECOND], messages=messages)
    rendered, ids, offsets, _ = encoded(renderer, row)
    total = int(loss_mask(offsets, rendered.replies).sum())
    windows = conversation_windows(rendered, ids, offsets, max_length=len(ids) - 1)
    assert len(windows) == 2
    assert sum(int(window.loss_mask.sum()) for window in windows) == total
    learned = np.concatenate([window.input_ids[window.loss_mask] for window in windows])
    assert learned.tolist() == all_tokens(row)


@pytest.mark.parametrize(
    "spoilt", ["Hm. other" + FIRST, FIRST.removesuffix("<|im_end|>"), ""], ids=["text", "end", "no"]
)
def test_tokens_that_say_something_else_are_not_used(renderer, spoilt):
    row = regenerated(renderer, [spoilt, SECOND])
    rendered, ids, offsets, num_own = encoded(renderer, row)
    assert num_own == 1
    said = renderer.tokenizer.decode(ids[loss_mask(offsets, rendered.replies)])
    assert said == FIRST + SECOND
    outside = regenerated(renderer, [FIRST, SECOND])
    outside["regenerated"]["turns"][0]["token_ids"] = [10**6]
    assert encoded(renderer, outside)[3] == 1


def test_tokens_are_not_part_of_what_is_said(renderer):
    row = regenerated(renderer, [FIRST, SECOND])
    without = {**row, "regenerated": None}
    own, plain = read_row(row)[1], read_row(without)[1]
    assert own != plain and content_digest(own) == content_digest(plain)
    short = regenerated(renderer, [FIRST])  # not one a reply: nobody knows whose they are
    assert read_row(short)[1] == plain


def test_prepare_counts_them(base, renderer, tmp_path):
    rows = [regenerated(renderer, [FIRST, SECOND], id="a")]
    source = write_jsonl(tmp_path / "own.jsonl", rows)
    report = prepare(base, [source], tmp_path / "out", held_out_percent=0)
    assert (report.replies_as_generated, report.replies_encoded_anew) == (2, 0)
    assert "2 with the tokens" in report.as_text()
    (written,) = load_prepared(tmp_path / "out")["train"]
    learned = np.asarray(written["input_ids"])[np.asarray(written["loss_mask"])]
    assert learned.tolist() == all_tokens(rows[0])
    spoilt = [json.loads(json.dumps(rows[0]).replace("Done.", "Done, and more."))]
    source = write_jsonl(tmp_path / "own.jsonl", spoilt)
    report = prepare(base, [source], tmp_path / "two", held_out_percent=0)
    assert (report.replies_as_generated, report.replies_encoded_anew) == (1, 1)
