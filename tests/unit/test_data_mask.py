"""Loss masks against conversations that were marked by hand, for three templates."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data_helpers import GOLDEN, make_base, read_row

from mtp.data.conversation import RowError, checked
from mtp.data.mask import Reply, loss_mask, num_edge_tokens, render_rows
from mtp.data.render import Renderer, load_tokenizer

CASES = json.loads((GOLDEN / "data_goldens.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """name -> tokenizer, with offsets that the post-processor trims in one of them."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        name: load_tokenizer(make_base(folder / name, name, trim_offsets=name == "qwen35"))
        for name in ("qwen35", "chatml", "drops_thinking")
    }


def supervised(row, renderer):
    """(text of the masked tokens, number of tokens over an edge)."""
    ids, offsets = renderer.encode([row.text])[0]
    mask = loss_mask(offsets, row.replies)
    assert renderer.tokenizer.decode(ids) == row.text
    return renderer.tokenizer.decode(ids[mask]), num_edge_tokens(offsets, row.replies)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize("num_checked", [0, 1000])
def test_hand_marked(case, num_checked, tokenizers):
    renderer = Renderer(
        tokenizers[case["template"]], thinking=case["thinking"], num_checked=num_checked
    )
    _, conversation = read_row(case["row"])
    rows = render_rows(checked(conversation), renderer)
    assert len(rows) == len(case["rows"])
    for row, lines in zip(rows, case["rows"], strict=True):
        marked = "\n".join(lines)
        assert row.text.endswith(marked.replace("«", "").replace("»", ""))
        wanted = "".join(piece.partition("»")[0] for piece in marked.split("«")[1:])
        found, num_edges = supervised(row, renderer)
        assert found == wanted
        assert num_edges == 0


def test_ids_are_those_of_the_tokenizer(tokenizers):
    for tokenizer in tokenizers.values():
        text = "<|im_start|>user\n a\n\n<think>\n\n</think>\n\nb;\n é世 <|im_end|>\n"
        ids, offsets = Renderer(tokenizer).encode([text])[0]
        assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert offsets[0, 0] == 0 and offsets[-1, 1] == len(text)
        assert (offsets[1:, 0] <= offsets[:-1, 1]).all(), "offsets leave text between tokens"


def test_no_reasoning_with_thinking_on_supervises_the_closing_tag(tokenizers):
    """The newline merges with the prompt's into one token: it is over the edge, and counted."""
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    renderer = Renderer(tokenizers["qwen35"])
    (rendered,) = render_rows(read_row(row)[1], renderer)
    found, num_edges = supervised(rendered, renderer)
    assert rendered.text.endswith("<think>\n\n</think>\n\nb<|im_end|>")
    assert num_edges == 1 and found == "</think>\n\nb<|im_end|>"


def test_every_reply_is_the_continuation_of_what_is_served(tokenizers):
    """Rendering both ways: the text before a reply equals the served prompt."""
    for name in ("qwen35", "drops_thinking"):
        renderer = Renderer(tokenizers[name])
        row = {"messages": [{"role": "user", "content": "q0"}]}
        for turn in range(4):
            reply = {"role": "assistant", "content": f"a{turn}", "reasoning_content": f"r{turn}"}
            row["messages"] += [reply, {"role": "user", "content": f"q{turn + 1}"}]
        conversation = read_row(row)[1]
        rows = render_rows(conversation, renderer)
        served = {
            renderer.text(conversation.messages[:index], (), generation_prompt=True)
            for index in (1, 3, 5, 7)
        }
        prompts = [r.text[: reply.start] for r in rows for reply in r.replies]
        assert len(prompts) == 4 and set(prompts) == served
        assert len(rows) == (1 if name == "qwen35" else 4)


def test_token_over_an_edge_is_not_supervised():
    offsets = np.asarray([[0, 2], [2, 5], [5, 6], [6, 8]])
    reply = Reply(cut=0, head=0, start=3, end=6)
    assert loss_mask(offsets, (reply,)).tolist() == [False, False, True, False]
    assert num_edge_tokens(offsets, (reply,)) == 1


def test_template_that_contradicts_its_generation_prompt_is_refused(tokenizers):
    tokenizer = tokenizers["chatml"]
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    kept = tokenizer.chat_template
    try:
        tokenizer.chat_template = kept.replace("assistant\\n'", "assistant\\n<think>\\n'")
        with pytest.raises(RowError, match="generation prompt"):
            render_rows(read_row(row)[1], Renderer(tokenizer))
    finally:
        tokenizer.chat_template = kept


def test_template_error_is_a_reason(tokenizers):
    messages = [
        {"role": "user", "content": "<tool_response>\nx\n</tool_response>"},
        {"role": "assistant", "content": "b"},
    ]
    with pytest.raises(RowError, match="chat template refuses it"):
        render_rows(read_row({"messages": messages})[1], Renderer(tokenizers["qwen35"]))


def test_string_and_object_arguments_render_alike(tokenizers):
    renderer = Renderer(tokenizers["qwen35"])
    texts = []
    for arguments in ({"a": 1, "b": {"c": [True]}}, '{"a": 1, "b": {"c": [true]}}'):
        call = {"function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        texts.append(render_rows(read_row({"messages": messages})[1], renderer)[0].text)
    assert texts[0] == texts[1] and '{"c": [true]}' in texts[0]
