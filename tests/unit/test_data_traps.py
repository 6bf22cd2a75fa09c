"""Traps of rows in the wild (shared/facts/data.md, table 2), each by its number."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from data_helpers import chat, make_base, read_row, write_jsonl
from data_rows import HERMES, OPENAI, SCHEMA

from graft.errors import UserError
from mtp.data.conversation import RowError, checked, cut_at_mismatch
from mtp.data.mask import loss_mask, render_rows
from mtp.data.prepare import prepare
from mtp.data.render import Renderer, load_tokenizer
from mtp.data.store import load_prepared

CHATTY = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_base(folder / name, name) for name in ("qwen35", "chatml", "drops_thinking")}


@pytest.fixture(scope="module")
def qwen(bases):
    return Renderer(load_tokenizer(bases["qwen35"]))


def rendered(row, renderer, **options):
    return render_rows(checked(read_row(row)[1], **options), renderer)


def with_call(arguments, **more):
    asked = {"function": {"name": "add", "arguments": arguments}}
    turns = [CHATTY[0], {"role": "assistant", "content": None, "tool_calls": [asked]}]
    return {"messages": turns, "tools": [SCHEMA], **more}


def refusal(row) -> str:
    with pytest.raises(RowError) as caught:
        checked(read_row(row)[1])
    return str(caught.value)


def test_trap_01_arguments_are_text(qwen):
    """Templates iterate over arguments: a text must become a mapping, broken ones are refused."""
    (row,) = rendered(with_call('{"a": 1, "b": {"c": [2]}}'), qwen)
    assert "<parameter=a>\n1\n</parameter>\n<parameter=b>\n{" in row.text
    for nothing in ("", None, "{}", {}):
        assert "<function=add>\n</function>" in rendered(with_call(nothing), qwen)[0].text
    for broken in ("null", "[1]", '{"a": ', "1"):
        assert "tool arguments" in refusal(with_call(broken))


def test_trap_02_no_double_encoding(qwen, bases):
    """A text of arguments and the same object render alike, in templates with XML and with JSON."""
    arguments = {"a": 1, "text": 'say "x"\n', "list": [1, {"b": None}]}
    as_json = "message.content + (message.tool_calls | tojson if message.tool_calls else '')"
    for name in ("qwen35", "chatml"):
        tokenizer = load_tokenizer(bases[name])
        if name == "chatml":
            template = tokenizer.chat_template
            tokenizer.chat_template = template.replace("message.content", as_json)
        renderer = Renderer(tokenizer)
        texts = {
            rendered(with_call(spelling), renderer)[0].text
            for spelling in (json.dumps(arguments), json.dumps(arguments, indent=2))
        }
        as_object = with_call({**arguments, "list": [1, {}]})
        as_text = with_call(json.dumps({**arguments, "list": [1, {}]}))
        assert len(texts) == 1 and '\\"text' not in texts.pop(), name
        assert rendered(as_object, renderer)[0].text == rendered(as_text, renderer)[0].text, name


def test_trap_03_arrow_types(qwen, bases, tmp_path):
    """One type a field: padded nulls stay out, and columns of other types don't matter."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [with_call({"a": 1}, extra=None), with_call({"z": "x"}, extra=3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    padded = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert padded[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["z"] is None
    for own, from_arrow in zip(rows, padded, strict=True):
        assert rendered(from_arrow, qwen)[0].text == rendered(own, qwen)[0].text
    lines = write_jsonl(tmp_path / "b.jsonl", [{**chat(1), "x": None}, {**chat(2), "x": "text"}])
    report = prepare(bases["qwen35"], [lines], tmp_path / "out", held_out_percent=0)
    assert report.train.rows == 2


def test_trap_04_content_null_missing_or_parts(qwen):
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo."}]
    row = {"messages": [CHATTY[0], {"role": "assistant", "content": parts}]}
    assert rendered(row, qwen)[0].text == rendered({"messages": CHATTY}, qwen)[0].text
    for nothing in ({"content": None}, {}):
        turns = [CHATTY[0], {"role": "assistant", **nothing}, *CHATTY]
        assert read_row({"messages": turns})[1].messages[1].content == ""
    for kind in ("image_url", "input_audio", "video"):
        turns = [{"role": "user", "content": [{"type": kind}]}, CHATTY[1]]
        assert f"message 0: content part of type {kind!r}" in refusal({"messages": turns})


def test_trap_05_system_messages(qwen):
    system = {"role": "system", "content": "One."}
    several = [system, {"role": "developer", "content": "Two."}, *CHATTY]
    assert (
        "<|im_start|>system\nOne.\n\nTwo.<|im_end|>"
        in rendered({"messages": several}, qwen)[0].text
    )
    moved = {"messages": [CHATTY[0], several[0], several[1], CHATTY[1]]}
    assert rendered(moved, qwen)[0].text == rendered({"messages": several}, qwen)[0].text
    assert "after the first reply (message 2)" in refusal({"messages": [*CHATTY, system, *CHATTY]})
    assert "no user message" in refusal({"messages": [system, CHATTY[1]]})
    assert "no user message" in refusal({"messages": [system]})


def test_trap_06_templates_that_move_thinking(bases):
    """Each row's text starts with what the server saw when its replies were written."""
    renderer = Renderer(load_tokenizer(bases["drops_thinking"]))
    conversation = checked(read_row(chat(1, num_turns=3))[1])
    rows = render_rows(conversation, renderer)
    assert len(rows) > 1
    served = [
        renderer.text(conversation.messages[:n], (), generation_prompt=True) for n in (1, 3, 5)
    ]
    replies = [(row.text[: reply.start], row) for row in rows for reply in row.replies]
    assert [prompt for prompt, _ in replies] == served
    assert all("Let me see." in row.text[row.replies[-1].start :] for row in rows)


def test_trap_07_thinking_inside_the_content(qwen):
    inline = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nHello."}
    field = {"role": "assistant", "content": "Hello.", "reasoning_content": "why"}
    texts = [rendered({"messages": [CHATTY[0], turn]}, qwen)[0].text for turn in (inline, field)]
    assert texts[0] == texts[1] and "<think>\nwhy\n</think>" in texts[0]
    block = {"role": "assistant", "content": [{"type": "thinking", "thinking": "why"},
                                              {"type": "text", "text": "Hello."}]}  # fmt: skip
    assert rendered({"messages": [CHATTY[0], block]}, qwen)[0].text == texts[0]
    unclosed = {"role": "assistant", "content": "<think>\nwhy"}
    assert "never closed" in refusal({"messages": [CHATTY[0], unclosed]})


def test_trap_08_tagged_json_is_rendered_by_the_template(qwen):
    (row,) = rendered({"conversations": HERMES}, qwen)
    assert row.text.count("<function=add>") == 2 and "{'name'" not in row.text
    assert '"name": "add", "arguments"' not in row.text
    assert row.text.count("<tools>") == 1


@pytest.mark.parametrize("role", ["narrator", "ai", "Assistant", "critic", 3])
def test_trap_09_unknown_roles(role):
    assert refusal({"messages": [*CHATTY, {"role": role, "content": "x"}]}) == (
        f"message 2: unknown role {role!r}"
    )


@pytest.mark.parametrize("role", ["observation", "function_response", "tool", "ipython"])
def test_trap_09_tool_results_are_never_supervised(role, qwen):
    turns = [*with_call({"a": 1})["messages"], {"role": role, "content": "RESULT"}, CHATTY[1]]
    (row,) = rendered({"messages": turns, "tools": [SCHEMA]}, qwen)
    spans = [row.text[reply.start : reply.end] for reply in row.replies]
    assert "RESULT" in row.text and not any("RESULT" in span for span in spans)


def test_trap_10_parallel_calls():
    whole = read_row({"messages": OPENAI, "tools": [SCHEMA]})[1]
    assert [c.id for c in whole.messages[2].tool_calls] == ["c1", "c2"]
    assert cut_at_mismatch(whole) == whole
    swapped = [*OPENAI[:3], OPENAI[4], OPENAI[3], OPENAI[5]]
    assert len(cut_at_mismatch(read_row({"messages": swapped})[1]).messages) == 6


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda turns: turns[4].update(tool_call_id="c9"), 4),  # a result of no call
        (lambda turns: turns[4].update(tool_call_id="c1"), 4),  # answered twice
        (lambda turns: turns.insert(5, copy.deepcopy(turns[4])), 5),  # one result too many
        (lambda turns: turns.pop(4), 4),  # a call without its result
        (lambda turns: turns.insert(0, turns[3]), 0),  # a result before all calls
        (lambda turns: [t.pop("tool_call_id", 0) for t in turns], 6),  # by order
        (lambda turns: turns.insert(4, {"role": "user", "content": "Stop."}), 7),  # interrupted
    ],
)
def test_trap_10_mismatches_are_cut(change, kept):
    turns = copy.deepcopy(OPENAI)
    change(turns)
    if kept == 7:
        turns.pop(5)  # the result that came too late
        kept = 6
    value = read_row({"messages": turns})[1]
    assert len(cut_at_mismatch(value).messages) == kept


def test_trap_11_tools_in_three_spellings(qwen):
    turns = with_call({"a": 1})["messages"]
    spellings = ([SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)], [SCHEMA["function"]])
    texts = {rendered({"messages": turns, "tools": tools}, qwen)[0].text for tools in spellings}
    assert len(texts) == 1
    assert refusal({"messages": turns}) == "tool calls without tool schemas"
    assert rendered({"messages": turns}, qwen, allow_missing_tools=True)


def test_trap_12_long_conversations_lose_nothing(bases, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [chat(number, num_turns=30) for number in range(3)])
    long = prepare(bases["qwen35"], [source], tmp_path / "long", held_out_percent=0)
    short = prepare(bases["qwen35"], [source], tmp_path / "s", held_out_percent=0, max_length=200)
    assert short.split_by_length > 0 and short.supervised_tokens_lost == 0
    assert short.train.supervised_tokens == long.train.supervised_tokens
    tiny = prepare(bases["qwen35"], [source], tmp_path / "t", held_out_percent=0, max_length=24)
    lost = tiny.supervised_tokens_lost
    assert lost and tiny.train.supervised_tokens + lost == long.train.supervised_tokens


def test_trap_13_one_row_a_conversation_split_by_conversation(bases, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [chat(number, num_turns=9) for number in range(30)])
    # Made from one mould; near-duplicates are what test_data_selection.py is about.
    settings = {"held_out_percent": 30, "near_duplicates": "ignore"}
    prepare(bases["qwen35"], [source], tmp_path / "whole", **settings)
    data = load_prepared(tmp_path / "whole")
    assert sum(map(len, data.values())) == 30
    prepare(bases["qwen35"], [source], tmp_path / "cut", max_length=200, **settings)
    cut = load_prepared(tmp_path / "cut")
    sides = [set(cut[split]["conversation_id"]) for split in ("train", "held_out")]
    assert all(sides) and not sides[0] & sides[1] and sum(map(len, cut.values())) > 60


def test_trap_14_documents_are_not_packed(bases, tmp_path):
    """Every row is one document, so that no source and target stand in two."""
    for name in ("one", "two"):
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code" / f"{name}.py").write_text(f"{name} = '{name}'\n")
    prepare(bases["qwen35"], [tmp_path / "code"], tmp_path / "out", held_out_percent=0)
    tokenizer = load_tokenizer(bases["qwen35"])
    texts = [tokenizer.decode(row["input_ids"]) for row in load_prepared(tmp_path / "out")["train"]]
    assert texts == ["one = 'one'\n", "two = 'two'\n"]


def test_trap_15_repeated_code_is_dropped(bases, tmp_path):
    for number in range(3):
        folder = tmp_path / "code" / str(number)
        folder.mkdir(parents=True)
        (folder / "licence.py").write_text("# The same header everywhere.\n")
        (folder / "own.py").write_text(f"x = {number}\n")
    report = prepare(bases["qwen35"], [tmp_path / "code"], tmp_path / "out", held_out_percent=0)
    assert report.train.rows == 4 and report.dropped == {"duplicate": 2}
    assert all(all(row["loss_mask"]) for row in load_prepared(tmp_path / "out")["train"])


def test_trap_16_numbers_as_text(bases, tmp_path):
    rows = [
        {"input": f"{score}?", "output": "x = 1", "average_test_score": score}
        for score in ("0.5", "1", "1.0", 1, "unknown")
    ]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    settings = {"held_out_percent": 0, "where": ["average_test_score>=1"]}
    report = prepare(bases["qwen35"], [source], tmp_path / "out", max_skip=0.2, **settings)
    assert (report.train.rows, report.rows_refused) == (2, 1)  # two of the three are equal
    assert report.dropped == {"not average_test_score>=1": 1, "duplicate": 1}
    assert "average_test_score 'unknown' is no number" in str(report.broken[0])


def test_trap_17_success_labels_are_filtered_only_when_asked(bases, tmp_path):
    rows = [{**chat(n), "resolved": label} for n, label in enumerate((-1, 0, 1, 1))]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    for where, wanted in ((), 4), (("resolved=1",), 2), (("resolved>=0",), 3):
        out = tmp_path / f"out{wanted}"
        report = prepare(bases["qwen35"], [source], out, held_out_percent=0, where=where)
        assert report.train.rows == wanted
        manifest = json.loads((out / "data.json").read_text())
        assert manifest["settings"]["where"] == list(where)


def test_trap_18_teachers_are_recorded(bases, tmp_path):
    nested = {"metadata": {"teacher_model": {"name": "B", "enable_thinking": True}}}
    rows = [{**chat(1), "model": "A"}, {**chat(2), **nested}, chat(3)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    report = prepare(bases["qwen35"], [source], tmp_path / "out", held_out_percent=0)
    assert report.as_dict()["rows_by_teacher"] == {"A": 1, "B": 1}


def test_trap_19_licences_are_recorded(bases, tmp_path):
    code = {"content": "x = 1\n", "lang": "Python", "licenses": ["MIT", "Apache-2.0"]}
    source = write_jsonl(tmp_path / "a.jsonl", [{**chat(1), "license": "CC-BY-4.0"}, chat(2), code])
    report = prepare(bases["qwen35"], [source], tmp_path / "out", held_out_percent=0)
    assert report.licences == {"CC-BY-4.0": 1, "unknown": 1, "MIT OR Apache-2.0": 1}


def test_trap_20_data_replaced_in_place_is_seen(bases, tmp_path):
    def digest(rows, out):
        source = write_jsonl(tmp_path / "a.jsonl", rows)
        prepare(bases["qwen35"], [source], tmp_path / out, held_out_percent=0)
        manifest = json.loads((tmp_path / out / "data.json").read_text())
        (counts,) = manifest["report"]["by_source"].values()
        return counts["content_sha256"]

    first = digest([chat(1), chat(2)], "one")
    assert first == digest([chat(1), chat(2)], "two") and len(first) == 64
    changed = chat(2)
    changed["messages"][1]["content"] += "!"
    assert first != digest([chat(1), changed], "three")
    assert first != digest([chat(1)], "four")
    with pytest.raises(UserError, match="hub:owner/name"):
        prepare(bases["qwen35"], ["hub:me/set?rev=1"], tmp_path / "five")


def test_mask_meaning_over_the_edge_of_a_reply(qwen):
    """Section 3: assistant text, reasoning and calls, never what a server puts before them."""
    row = with_call({"a": 1})
    row["messages"][1] |= {"content": "Adding.", "reasoning_content": "Hm."}
    row["messages"] += [{"role": "tool", "content": "RESULT"}, CHATTY[1]]
    (text_row,) = rendered(row, qwen)
    ((ids, offsets),) = qwen.encode([text_row.text])
    mask = loss_mask(offsets, text_row.replies)
    edges = np.flatnonzero(np.diff(mask.astype(np.int8)))
    pieces = [qwen.tokenizer.decode(part) for part in np.split(ids, edges + 1)]
    assert pieces[1] == (
        "Hm.\n</think>\n\nAdding.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>"
    )
    # The newline before an empty block's end is merged into the prompt's token.
    prompt = "RESULT\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n"
    assert pieces[2] == "\n<|im_start|>user\n<tool_response>\n" + prompt
    assert pieces[0].endswith("<|im_start|>assistant\n<think>\n")
