"""Special tokens that a text only mentions: text in replies and documents, special elsewhere."""

from __future__ import annotations

import json

import pytest
from data_helpers import chat, make_base, read_row, write_jsonl

from mtp.data.conversation import RowError, checked
from mtp.data.encode import Encoder
from mtp.data.mask import loss_mask, render_rows
from mtp.data.own_tokens import encode_rows
from mtp.data.prepare import prepare
from mtp.data.render import Renderer, load_tokenizer
from mtp.data.store import load_prepared

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MENTION = "one\n<|im_end|>\n<|im_start|>assistant\ntwo\n<|im_end|>"
CALL = {"id": "c", "function": {"name": "write", "arguments": {"text": "a<|endoftext|>é<|im_"}}}
TOOL = {"type": "function", "function": {"name": "write"}}
ROW = {
    "messages": [
        {"role": "user", "content": "What ends a turn, <|im_end|>?"},
        {"role": "assistant", "content": MENTION, "reasoning_content": "So: <|im_end|><|im_end|>"},
        {"role": "user", "content": "Write it."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    ],
    "tools": [TOOL],
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_base(folder / name, name) for name in ("qwen35", "chatml", "drops_thinking")}


def encoded(row, renderer):
    """[(rendered row, ids, mask)]."""
    rows = render_rows(checked(read_row(row)[1]), renderer)
    return [
        (rendered, ids, loss_mask(offsets, rendered.replies))
        for rendered, (ids, offsets, _) in zip(rows, encode_rows(rows, renderer), strict=True)
    ]


def ids_of(tokenizer, *names):
    return [tokenizer.convert_tokens_to_ids(name) for name in names]


def test_a_mentioned_token_is_supervised_as_text(bases):
    for name, thinking in (("qwen35", "keep"), ("qwen35", "strip"), ("chatml", "keep")):
        tokenizer = load_tokenizer(bases[name])
        ((rendered, ids, mask),) = encoded(
            ROW if name == "qwen35" else {"messages": ROW["messages"][:2]},
            Renderer(tokenizer, thinking=thinking),
        )
        assert tokenizer.decode(ids) == rendered.text
        special = set(ids_of(tokenizer, *SPECIAL))
        learnt = [token for token in ids[mask].tolist() if token in special]
        (end,) = ids_of(tokenizer, "<|im_end|>")
        assert learnt == [end] * len(rendered.replies)
        wanted = [rendered.text[reply.start : reply.end] for reply in rendered.replies]
        assert tokenizer.decode(ids[mask]) == "".join(wanted)
        assert MENTION in wanted[0] and wanted[0].endswith(MENTION + "<|im_end|>")
        # What the user typed is what the server makes of it.
        whole = tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
        first = rendered.text.index("?")
        assert whole[:8] == ids[:8].tolist() and "<|im_end|>" in rendered.text[:first]
        assert end in ids[:first].tolist()
        assert whole != ids.tolist(), "the mention would be a special token"


def test_as_transformers_sanitizes(bases):
    """It encodes mentions as text everywhere, so here only a reply has some, on their own lines."""
    tokenizer = load_tokenizer(bases["qwen35"])
    messages = [{"role": "user", "content": "What?"}, ROW["messages"][1]]
    messages[1] = messages[1] | {"reasoning_content": "So:\n<|im_end|>\nit is."}
    ((_, ids, _),) = encoded({"messages": messages}, Renderer(tokenizer))
    wanted = tokenizer.apply_chat_template(
        messages, sanitize_control_tokens=True, enable_thinking=True
    )["input_ids"]
    assert ids.tolist() == wanted[: len(ids)] and tokenizer.decode(wanted[len(ids) :]) == "\n"
    plain = tokenizer.apply_chat_template(messages, enable_thinking=True)["input_ids"]
    assert plain[: len(ids)] != ids.tolist()


def test_several_rows_where_the_template_moves_thinking(bases):
    tokenizer = load_tokenizer(bases["drops_thinking"])
    row = chat(3, num_turns=3)
    for message in row["messages"][1::2]:
        message["content"] += " <|im_end|> <s>"
    rows = encoded(row, Renderer(tokenizer))
    (end,) = ids_of(tokenizer, "<|im_end|>")
    assert len(rows) > 1
    for rendered, ids, mask in rows:
        assert tokenizer.decode(ids) == rendered.text
        assert ids[mask].tolist().count(end) == len(rendered.replies)
        # Context of the same row, too, is as the model wrote it.
        assert ids.tolist().count(end) == rendered.text.count("<|im_end|>") - len(rendered.literals)


def test_tokens_that_the_base_generated_are_kept(bases):
    tokenizer = load_tokenizer(bases["chatml"])
    spelt = [token for letter in "x<|im_end|>y" for token in tokenizer.encode(letter)]
    turns = [{"token_ids": [*spelt, *ids_of(tokenizer, "<|im_end|>")]}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x<|im_end|>y"}]
    ((_, ids, mask),) = encoded(
        {"messages": messages, "regenerated": {"turns": turns}}, Renderer(tokenizer)
    )
    assert ids[mask].tolist() == turns[0]["token_ids"]


def test_a_turn_may_hold_its_end_token_twice(bases):
    """As gpt-oss ends its thinking and its answer; only a mention was ever doubtful."""
    tokenizer = load_tokenizer(bases["chatml"])
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content", "message.content + '<|im_end|><|im_start|>final\\n' + message.content"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ((_, ids, mask),) = encoded({"messages": messages}, Renderer(tokenizer))
    assert tokenizer.decode(ids[mask]) == "b<|im_end|><|im_start|>final\nb<|im_end|>"


def test_what_cannot_be_told_apart_is_refused(bases):
    tokenizer = load_tokenizer(bases["chatml"])
    row = {"messages": ROW["messages"][:2]}
    private = [row["messages"][0], {"role": "assistant", "content": MENTION + "\U000f0001"}]
    with pytest.raises(RowError, match="message 1 holds a special token and private"):
        encoded({"messages": private}, Renderer(tokenizer))
    kept = tokenizer.chat_template
    tokenizer.chat_template = kept.replace(
        "message.content", "message.content | replace('<|im_end|>', '')"
    )
    with pytest.raises(RowError, match="template changes a special token"):
        encoded(row, Renderer(tokenizer))
    tokenizer.chat_template = kept


def test_a_tokenizer_that_cannot_spell(bases):
    """One whose special token takes in the space behind it, or is a word of the vocabulary."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer(bases["chatml"])
    assert Encoder(tokenizer).can_spell
    greedy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    greedy.add_special_tokens([AddedToken("<|end|>", special=True, rstrip=True)])
    word = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    word.add_special_tokens([AddedToken("a", special=True)])
    for backend in (greedy, word):
        broken = PreTrainedTokenizerFast(tokenizer_object=backend)
        broken.chat_template = tokenizer.chat_template
        assert not Encoder(broken).can_spell
        with pytest.raises(RowError, match="message 1 holds a special token in its text"):
            encoded({"messages": ROW["messages"][:2]}, Renderer(broken))


def test_prepare_counts_mentions_and_spells_documents(bases, tmp_path):
    code = tmp_path / "src"
    code.mkdir()
    (code / "tokens.py").write_text("END = '<|im_end|>'\n" * 4)
    tagged = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the `</think>`"}]
    rows = write_jsonl(tmp_path / "rows.jsonl", [ROW, {"messages": tagged}])
    out = tmp_path / "out"
    prepare(bases["qwen35"], [rows, code], out, held_out_percent=0, num_workers=1)
    report = json.loads((out / "data.json").read_text())["report"]
    assert report["special_tokens_spelt"] == 3 + 2 + 1 + 4
    assert report["closing_tags_in_text"] == 1 and report["rows_refused"] == 0
    tokenizer = load_tokenizer(bases["qwen35"])
    (end,) = ids_of(tokenizer, "<|im_end|>")
    rows = load_prepared(out)["train"].to_list()
    (document,) = [row["input_ids"] for row in rows if row["category"] == "code"]
    assert end not in document
    assert tokenizer.decode(document) == "END = '<|im_end|>'\n" * 4
