"""Windows: turn boundaries, kept context, each reply supervised once, losses counted."""

from __future__ import annotations

import numpy as np
import pytest
from data_helpers import make_base, read_row

from mtp.data.mask import loss_mask, render_rows
from mtp.data.render import Renderer, load_tokenizer
from mtp.data.windows import conversation_windows, document_windows

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    base = make_base(tmp_path_factory.mktemp("base"), "qwen35")
    return Renderer(load_tokenizer(base))


def windows_of(renderer, messages, max_length, tools=()):
    """(windows as texts, their supervised texts, supervised tokens before, windows)."""
    row = {"messages": messages, "tools": list(tools)}
    (rendered,) = render_rows(read_row(row)[1], renderer)
    ids, offsets = renderer.encode([rendered.text])[0]
    total = int(loss_mask(offsets, rendered.replies).sum())
    windows = conversation_windows(rendered, ids, offsets, max_length=max_length)
    decode = renderer.tokenizer.decode
    texts = [decode(window.input_ids) for window in windows]
    learned = [decode(window.input_ids[window.loss_mask]) for window in windows]
    assert all(len(window.input_ids) <= max_length for window in windows)
    return texts, learned, total, windows


def reply(text, **fields):
    return {"role": "assistant", "content": text, "reasoning_content": "Hm.", **fields}


def test_short_rows_stay_whole(renderer):
    texts, _, _, windows = windows_of(
        renderer, [{"role": "user", "content": "a"}, reply("b")], 10_000
    )
    assert len(texts) == 1 and not windows[0].cut_inside


def test_chat_is_cut_before_questions(renderer):
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(12):
        messages += [{"role": "user", "content": f"q{turn} " * 5}, reply(f"a{turn} " * 5)]
    texts, learned, total, windows = windows_of(renderer, messages, 200)
    assert len(texts) > 2
    opening = texts[0].partition("<|im_start|>assistant")[0]
    for text in texts:
        assert text.startswith(opening) and text.endswith("<|im_end|>")
        rest = text.removeprefix(opening)
        assert rest.startswith("<|im_start|>" + ("assistant" if text == texts[0] else "user"))
    joined = "".join(learned)
    for turn in range(12):
        assert joined.count(f"a{turn} a{turn} ") >= 1
    assert joined.count("<|im_end|>") == 12
    assert sum(int(window.loss_mask.sum()) for window in windows) == total
    assert not any(window.cut_inside for window in windows)


def test_tool_results_keep_their_call_as_unsupervised_context(renderer):
    messages = [{"role": "user", "content": "Fix it."}]
    for turn in range(10):
        call = {"function": {"name": "f", "arguments": {"n": turn}}}
        messages += [
            reply("", tool_calls=[call]),
            {"role": "tool", "content": f"result {turn} " * 8},
        ]
    messages.append(reply("Done."))
    texts, learned, total, windows = windows_of(renderer, messages, 460, tools=[TOOL])
    assert len(texts) > 2
    for text in texts[1:]:
        opening, _, rest = text.partition("Fix it.<|im_end|>\n")
        assert "<tools>" in opening and rest.startswith("<|im_start|>assistant\n<think>\n")
        first_call = rest.index("<parameter=n>\n") + len("<parameter=n>\n")
        number = int(rest[first_call : rest.index("\n</parameter>", first_call)])
        assert f"result {number} " in rest, "a result without the call before it"
    joined = "".join(learned)
    assert [joined.count(f"<parameter=n>\n{turn}\n") for turn in range(10)] == [1] * 10
    assert "result" not in joined and joined.count("Done.") == 1
    assert sum(int(window.loss_mask.sum()) for window in windows) == total


def test_a_turn_that_is_too_long_is_cut_and_told(renderer):
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Fix it."},
        reply("", tool_calls=[call]),
        {"role": "tool", "content": "line " * 400 + "last"},
        reply("Done."),
    ]
    texts, learned, total, windows = windows_of(renderer, messages, 150)
    assert [window.cut_inside for window in windows] == [False, True]
    assert "Fix it." in texts[1] and "last\n</tool_response>" in texts[1]
    assert learned[1].endswith("Done.<|im_end|>")
    assert sum(int(window.loss_mask.sum()) for window in windows) == total


def test_a_reply_that_is_too_long_loses_its_tail_only(renderer):
    messages = [{"role": "user", "content": "Count."}, reply("one two three " * 100)]
    texts, _, total, windows = windows_of(renderer, messages, 64)
    assert texts[0].startswith("<|im_start|>assistant\n<think>\nHm.")
    kept = int(windows[0].loss_mask.sum())
    assert windows[0].cut_inside and 50 < kept < 64 < total


def test_a_long_opening_gives_way_to_the_reply(renderer):
    messages = [{"role": "user", "content": "word " * 200}, reply("Short.")]
    _, learned, total, windows = windows_of(renderer, messages, 64)
    assert learned[0].endswith("Short.<|im_end|>") and "word <|im_end|>" not in learned[0]
    assert int(windows[0].loss_mask.sum()) == total and len(windows[0].input_ids) == 64


def test_documents_are_tiled():
    ids = np.arange(23, dtype=np.int32)
    windows = list(document_windows(ids, max_length=10))
    assert [len(window.input_ids) for window in windows] == [10, 10, 3]
    assert np.concatenate([window.input_ids for window in windows]).tolist() == list(range(23))
    assert all(window.loss_mask.all() for window in windows)
