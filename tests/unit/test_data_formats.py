"""Readers: what each trap of rows in the wild becomes, or why it is refused."""

from __future__ import annotations

import json

import pytest
from data_helpers import read_row

from mtp.data.conversation import RowError, checked
from mtp.data.formats.fields import arguments_text, split_reasoning, text_of, tools_texts

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}


def row(*messages, **fields):
    return {"messages": [{"role": r, "content": c} for r, c in messages], **fields}


def with_calls(*calls, **fields):
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
    ]
    return {"messages": messages, "tools": [TOOL], **fields}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("", {}),
        (None, {}),
        ({"a": 1, "padding": None, "b": {"c": None}}, {"a": 1, "b": {}}),
        ('{"a": null, "b": "x"}', {"a": None, "b": "x"}),
    ],
)
def test_arguments(arguments, wanted):
    assert json.loads(arguments_text(arguments)) == wanted


@pytest.mark.parametrize("arguments", ["null", "[1]", '{"a": ', "plain", 3, [1]])
def test_broken_arguments_are_refused(arguments):
    with pytest.raises(RowError, match="arguments"):
        arguments_text(arguments)


def test_content():
    assert text_of(None) == ""
    assert text_of([{"type": "text", "text": "a"}, "b", {"text": "c"}]) == "abc"
    for broken in ([{"type": "image_url", "image_url": "x"}], {"a": 1}, 3, [None]):
        with pytest.raises(RowError, match="content"):
            text_of(broken)


def test_tools_in_three_spellings():
    as_list = tools_texts([TOOL])
    assert json.loads(as_list[0]) == {
        "type": "function",
        "function": {"name": "f", "parameters": {}},
    }
    kept = json.loads(tools_texts(json.dumps([TOOL]))[0])["function"]["parameters"]
    assert tools_texts([json.dumps(TOOL)]) == (json.dumps(TOOL),)
    assert kept == {} and tools_texts(None) == tools_texts("[]") == ()
    for broken in ("{", [3], {"a": 1}):
        with pytest.raises(RowError, match="tool"):
            tools_texts(broken)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("<think>\nwhy\n</think>\n\nso", ("why", "so")),
        ("why\n</think>\n\nso", ("why", "so")),
        ("<think>\n\n</think>\n\nso", ("", "so")),
        ("the tag <think> opens and </think> closes", None),
        ("plain", None),
        ("why.</think>so", ("why.", "so")),
        ("why.</think> so", ("why.", " so")),
        ("why.\n</think> so", ("why.", " so")),
        ("</think>\n\nso", ("", "so")),
        ("</think>so", ("", "so")),
        ('he said "why"</think>\n\n**so**', ('he said "why"', "**so**")),
        ("is `<think>` there?\n</think>\n\nso", ("is `<think>` there?", "so")),
        ("why `</think>`?\n</think>\n\nso", ("why `</think>`?", "so")),
        ("<think>\nis `</think>` meant?\n</think>\n\nso", ("is `</think>` meant?", "so")),
        ("<think> why </think> so", (" why ", " so")),
        ("The block ends with `</think>`, then the answer.", None),
        ("The block ends with </think>.\nThen the answer.", None),
        ("The block ends with </think>\nThen the answer.", None),
        ('It splits at "</think>" and ("</think>"), or (</think>).', None),
        ("</think> is the tag that ends it.", None),
        ("It prints:\n```\nwhy\n</think>\nso\n```\nas asked.", None),
        ("so **why**</think>**so**", ("so **why**", "**so**")),
        ('("</think>" or **</think>**', None),
        ("- </think>: it closes\n* **</think>** too", None),
    ],
)
def test_reasoning_inside_content(content, wanted):
    assert split_reasoning(content) == (wanted or ("", content))


def test_unclosed_reasoning_is_refused():
    with pytest.raises(RowError, match="never closed"):
        read_row(row(("user", "a"), ("assistant", "<think>\nwhy")))


def test_reasoning_field_leaves_content_alone():
    message = {"role": "assistant", "content": "see </think>", "reasoning_content": "r"}
    _, read = read_row({"messages": [{"role": "user", "content": "a"}, message]})
    assert (read.messages[1].reasoning, read.messages[1].content) == ("r", "see </think>")
    for field, wanted in (("", ("", "a\n</think>\nb")), (None, ("a", "b"))):
        message = {"role": "assistant", "content": "a\n</think>\nb", "reasoning_content": field}
        _, read = read_row({"messages": [{"role": "user", "content": "a"}, message]})
        assert (read.messages[1].reasoning, read.messages[1].content) == wanted
    block = {"role": "assistant", "content": "<think>a</think>b", "reasoning_content": ""}
    _, read = read_row({"messages": [{"role": "user", "content": "a"}, block]})
    assert (read.messages[1].reasoning, read.messages[1].content) == ("a", "b")


@pytest.mark.parametrize("role", ["narrator", "Assistant", "ai", "", None, ["user"]])
def test_unknown_role_is_never_an_assistant(role):
    with pytest.raises(RowError, match=r"message 1: unknown role"):
        read_row(row(("user", "a"), (role, "b")))


def test_parallel_calls_keep_their_order_and_ids():
    calls = [{"id": str(i), "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(3)]
    read = read_row(with_calls(*calls))[1].messages[1].tool_calls
    assert [(call.id, call.name) for call in read] == [("0", "f0"), ("1", "f1"), ("2", "f2")]


def test_older_function_call():
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "1"},
    ]
    read = read_row({"messages": messages, "tools": [TOOL]})[1].messages
    assert read[1].tool_calls[0].arguments == '{"a": 1}' and read[2].role == "tool"


def test_a_turn_that_is_none_is_refused_by_its_place():
    for key in ("messages", "trajectory"):
        with pytest.raises(RowError, match="message 1: a JSON str, not an object"):
            read_row({key: [{"role": "user", "content": "a"}, "b"]})


@pytest.mark.parametrize("call", [{}, "f", {"function": {"arguments": "{}"}}, {"function": 3}])
def test_call_without_a_name_is_refused(call):
    with pytest.raises(RowError, match="a tool call"):
        read_row(with_calls(call))


def test_category_and_licence():
    plain = row(("user", "a"), ("assistant", "b"))
    assert read_row(plain)[1].category == "chat"
    assert read_row({**plain, "category": "code", "license": "mit"})[1].category == "code"
    assert read_row({**plain, "category": "sports"})[1].category == "chat"
    agent = read_row({**with_calls({"function": {"name": "f"}}), "license": "mit"})[1]
    assert (agent.category, agent.licence) == ("agent", "mit")


@pytest.mark.parametrize("value", [{"text": "a"}, {}, [1, 2], "text", 3, None, {"messages": "x"}])
def test_unknown_shape_is_refused(value):
    with pytest.raises(RowError, match="unknown shape"):
        read_row(value)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([("user", "a"), ("assistant", "b"), ("system", "s")], "system message after the first"),
        ([("system", "s"), ("assistant", "b")], "no user message"),
        ([("system", "s")], "no user message"),
        ([("user", "a")], "no assistant message"),
        ([("assistant", "b"), ("user", "a")], "no assistant message"),
    ],
)
def test_conversations_that_teach_nothing_are_refused(messages, reason):
    with pytest.raises(RowError, match=reason):
        checked(read_row(row(*messages))[1])


def test_leading_system_messages_are_merged():
    messages = [("system", "a"), ("developer", "b"), ("user", "c"), ("assistant", "d")]
    merged = checked(read_row(row(*messages))[1])
    assert [m.role for m in merged.messages] == ["system", "user", "assistant"]
    assert merged.messages[0].content == "a\n\nb"


def test_calls_without_schemas_need_the_option():
    read = read_row(with_calls({"function": {"name": "f"}}, tools=None))[1]
    with pytest.raises(RowError, match="without tool schemas"):
        checked(read)
    assert checked(read, allow_missing_tools=True).messages == read.messages
