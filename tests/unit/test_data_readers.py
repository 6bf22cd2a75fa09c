"""Every reader on a row of its format: recognised, read in full, and refused when spoilt."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from data_helpers import make_base
from data_rows import (
    ADP,
    ATIF,
    CLAUDE,
    EVENTS,
    HERMES,
    INFERENCES,
    OPENAI,
    PARALLEL,
    ROWS,
    SCHEMA,
    TAU2,
)

from graft.errors import UserError
from mtp.data.conversation import Conversation, Document, Note, RowError, checked, cut_at_mismatch
from mtp.data.formats import FILE_FORMATS, FORMATS, recogniser
from mtp.data.formats.tagged import opens_call, split_calls
from mtp.data.mask import loss_mask, render_rows
from mtp.data.render import Renderer, load_tokenizer

IDS = [f"{name}-{number}" for number, (name, *_) in enumerate(ROWS)]
every_row = pytest.mark.parametrize(("name", "row", "wanted", "num_tools"), ROWS, ids=IDS)


def summary(conversation: Conversation) -> list[Any]:
    """Messages as data_rows writes them."""
    lines: list[Any] = []
    for message in conversation.messages:
        turn: tuple[Any, ...] = (message.role, message.content)
        if message.tool_calls:
            turn += ([(call.name, json.loads(call.arguments)) for call in message.tool_calls],)
        if message.tool_call_id:
            turn += (message.tool_call_id,)
        lines.append(turn)
    return lines


@every_row
def test_row_is_recognised_and_read(name, row, wanted, num_tools):
    before = copy.deepcopy(row)
    found, value = recogniser().read(row)
    assert (found, type(value).__name__) == (
        name,
        "Document" if isinstance(wanted, str) else "Conversation",
    ), value
    if isinstance(value, Document):
        assert value.text == wanted and value.category == "code"
        return
    assert summary(value) == wanted
    assert len(value.tools) == num_tools
    for tool in map(json.loads, value.tools):
        assert tool["type"] == "function" and tool["function"]["name"] == "add"
        assert tool["function"]["parameters"] == SCHEMA["function"]["parameters"]
    assert row == before, "a reader must not change its row"


@every_row
def test_forced_format_reads_its_row_and_no_other(name, row, wanted, num_tools):
    assert recogniser(name).read(row)[1] == recogniser().read(row)[1]
    found, value = recogniser(name).read({"text": "x"})
    assert found == "unknown" and f"not of the format {name}" in str(value)


def spoilt(value: Any) -> Any:
    """The row with every speaker replaced by one that no format knows."""
    if isinstance(value, list):
        return [spoilt(item) for item in value]
    if not isinstance(value, dict):
        return value
    speakers = {"role", "from", "source", "class_"}
    return {k: "narrator" if k in speakers else spoilt(v) for k, v in value.items()}


@every_row
def test_unknown_speakers_never_become_replies(name, row, wanted, num_tools):
    if isinstance(row, dict) and isinstance(row.get("messages"), str):
        row = {**row, "messages": json.dumps(spoilt(json.loads(row["messages"])))}
    broken = spoilt(row)
    if broken == row:
        pytest.skip("a format without speakers")
    value = recogniser().read(broken)[1]
    assert isinstance(value, RowError), value


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(load_tokenizer(make_base(tmp_path_factory.mktemp("base") / "b", "qwen35")))


@every_row
def test_row_renders_with_exactly_the_replies_supervised(name, row, wanted, num_tools, renderer):
    value = recogniser().read(row)[1]
    if isinstance(value, Document) or value.is_prompts_only:
        return
    conversation = checked(cut_at_mismatch(value), allow_missing_tools=True)
    (rendered,) = render_rows(conversation, renderer)
    ((ids, offsets),) = renderer.encode([rendered.text])
    mask = loss_mask(offsets, rendered.replies)
    supervised = renderer.tokenizer.decode(ids[mask])
    replies = [m for m in conversation.messages if m.role == "assistant"]
    assert supervised.count("<|im_end|>") == len(rendered.replies) == len(replies)
    for message in conversation.messages:
        if message.role != "assistant" and len(message.content) > 1:
            assert message.content not in supervised
    for reply in replies:
        assert reply.content.strip() in supervised and reply.reasoning in supervised
        for call in reply.tool_calls:
            assert f"<function={call.name}>" in supervised
    assert np.diff(np.flatnonzero(mask)).max(initial=1) > 1 or len(replies) == 1


def test_every_format_has_a_row_here():
    covered = {name for name, *_ in ROWS} | {"claude-code", "tau2-bench"}
    assert covered == {f.name for f in FORMATS} | {f.name for f in FILE_FORMATS}


def test_reasoning_reaches_its_field():
    for row in (ATIF, ADP):
        value = recogniser().read(row)[1]
        assert [m.reasoning for m in value.messages if m.reasoning] == ["Hm."]
    blocks = next(row for name, row, *_ in ROWS if name == "openai-messages" and "system" in row)
    thought = recogniser().read(blocks)[1].messages[2]
    assert (thought.reasoning, thought.content) == ("Two sums.", "Adding.")
    said = "<think>\nwhy\n</think>\n\n<tool_call>" + json.dumps({"name": "add"}) + "</tool_call>"
    inline = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
    }
    name, value = recogniser().read(inline)
    assert name == "hermes" and value.messages[1].reasoning == "why"
    assert value.messages[1].tool_calls[0].name == "add"


def test_hermes_drops_only_the_section_on_tools():
    value = recogniser().read({"conversations": HERMES})[1]
    assert value.messages[0].content == "Be brief."
    only = copy.deepcopy(HERMES)
    only[0]["value"] = only[0]["value"].removeprefix("Be brief.\n\n")
    assert recogniser().read({"conversations": only})[1].messages[0].role == "user"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>\n{"name": "add"', "never closed"),
        ("<tool_call>\nadd(1, 2)\n</tool_call>", "neither JSON nor a Python literal"),
        ('<tool_call>\n{"arguments": {"name": "add"}}\n</tool_call>', "without a function name"),
        ("<tool_call>\n{'name': 'add', 'arguments': {1, 2}}\n</tool_call>", "neither JSON"),
    ],
)
def test_hermes_refuses_broken_tags(text, reason):
    turns = copy.deepcopy(HERMES)
    turns[2]["value"] = text
    name, value = recogniser().read({"conversations": turns})
    assert name == "hermes" and isinstance(value, RowError) and reason in str(value)
    assert str(value).startswith("message 2: ")


def test_a_mention_of_tags_is_text():
    row = {"messages": [{"role": "user", "content": "How?"},
                        {"role": "assistant", "content": "Write <tool_call> first."}]}  # fmt: skip
    name, value = recogniser().read(row)
    assert name == "openai-messages" and value.messages[1].content == "Write <tool_call> first."


def test_claude_code_log_is_its_conversations():
    parts = list(recogniser().file_format(CLAUDE[1]).read_parts(list(enumerate(CLAUDE, start=1))))
    conversations = {c.id: (lines, c) for lines, c in parts if isinstance(c, Conversation)}
    assert set(conversations) == {"s", "s-x1"}
    lines, main = conversations["s"]
    assert summary(main) == PARALLEL[1:] and lines == [2, 3, 4, 5, 6, 9, 11]
    assert main.messages[1].reasoning == "Two sums." and main.teacher == "claude"
    assert summary(conversations["s-x1"][1]) == [("user", "Look."), ("assistant", "Seen.")]
    notes = [(lines, note.reason) for lines, note in parts if isinstance(note, Note)]
    assert notes == [([1], "not a turn"), ([10], "on an abandoned branch")]
    assert sorted(n for numbers, _ in parts for n in numbers) == list(range(1, len(CLAUDE) + 1))


def test_claude_code_refuses_foreign_lines_and_images():
    image = copy.deepcopy(CLAUDE)
    image[1]["message"]["content"] = [{"type": "image", "source": {}}]
    rows = list(enumerate([*image, {"other": 1}, RowError("broken JSON")], start=1))
    parts = list(recogniser().file_format(CLAUDE[1]).read_parts(rows))
    refused = {numbers[0]: str(value) for numbers, value in parts if isinstance(value, RowError)}
    assert refused[12] == "not a line of a Claude Code log" and refused[13] == "broken JSON"
    assert "only text can be used" in refused[2]


def test_openhands_refuses_what_the_model_did_not_say():
    events = copy.deepcopy(EVENTS)
    del events[4]["tool_call_metadata"]
    value = recogniser().read({"history": events})[1]
    assert isinstance(value, RowError) and "event 4" in str(value)
    assert "without the model's own reply" in str(value)
    events[4] = {**EVENTS[1], "args": {"content": "see", "image_urls": ["x"]}}
    assert "images" in str(recogniser().read({"history": events})[1])


@pytest.mark.parametrize(
    ("rates", "reason"),
    [((0.0, "0"), "no completion passes"), ((1.0, "n/a"), "no number"), ((), "no completion")],
)
def test_acecode_needs_a_pass(rates, reason):
    inferences = [{**INFERENCES[0], "pass_rate": rate} for rate in rates]
    value = recogniser().read({"question": "q", "inferences": inferences})[1]
    assert isinstance(value, RowError) and reason in str(value)


def test_demonstrations_and_copied_context_are_not_supervised():
    for mark in ({"is_demo": True}, {"weight": 0}, {"loss": False}, {"train": False}):
        turns = copy.deepcopy(OPENAI)
        turns[2] |= mark
        value = recogniser().read({"messages": turns})[1]
        assert [m.supervised for m in value.messages if m.role == "assistant"] == [False, True]
    copied = copy.deepcopy(ATIF)
    copied["steps"][2]["is_copied_context"] = True
    assert not recogniser().read(copied)[1].messages[2].supervised


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": "  "}, "an empty completion"),
        ({"query": "a", "tools": "[]", "answers": "[]"}, "no list of calls"),
        ({"query": "a", "tools": "[]", "answers": "{"}, "answers: broken JSON"),
        ({"messages": "[1]"}, "not a list of turns"),
        ({"messages": "[{"}, "messages: broken JSON"),
        ({**ATIF, "steps": [{"source": "narrator"}]}, "step 0: unknown source"),
        ({"content": [{"class_": "image_observation"}]}, "item 0: unknown class_"),
        ({"content": [{"class_": "web_observation", "source": "environment"}]}, "without text"),
        ({"input": "a", "output": [{"type": "web_search_call"}]}, "item 1 of type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "a tool_use block"),
    ],
)
def test_rows_that_do_not_fit_their_format(row, reason):
    name, value = recogniser().read(row)
    assert name != "unknown" and isinstance(value, RowError) and reason in str(value)


def test_mapped_keys_come_first_and_others_are_recognised():
    mapped = recogniser(mapping="prompt=frage,response=antwort")
    name, value = mapped.read({"frage": "Say a word.", "antwort": "Word.", "prompt": "no"})
    assert name == "mapped" and summary(value) == [("user", "Say a word."), ("assistant", "Word.")]
    assert mapped.read({"messages": OPENAI})[0] == "openai-messages"
    assert recogniser(mapping="prompt=frage").read({"frage": "a"})[1].is_prompts_only
    assert recogniser(mapping="text=body").read({"body": "x = 1"})[1].text == "x = 1"
    broken = mapped.read({"frage": 3, "antwort": "b"})[1]
    assert isinstance(broken, RowError) and "JSON int" in str(broken)
    for wrong in ("prompt", "reply=b", "prompt=", "prompt=a,answer=b", "prompt=a,response"):
        with pytest.raises(UserError, match="--map"):
            recogniser(mapping=wrong)
    with pytest.raises(UserError, match="openai-messages"):
        recogniser("openai")


def test_a_call_in_a_fenced_example_is_text():
    example = 'Hermes writes:\n```\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n```'
    assert not opens_call(example) and split_calls(example) == (example, [])
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    text, calls = split_calls(f"{example}\nNow for real.\n{call}")
    assert text == f"{example}\nNow for real." and [c["name"] for c in calls] == ["g"]
    assert opens_call(f"{example}\n{call}")


def test_tau2_results_as_the_agent_saw_them():
    (format_,) = [f for f in FILE_FORMATS if f.name == "tau2-bench"]
    assert format_.is_part(TAU2) and recogniser().file_format(TAU2) is format_
    (first, conversation), (_, refused) = format_.read_parts([(1, TAU2)])
    assert first == [1] and summary(conversation) == [
        ("system", "Be brief."),
        ("assistant", "How can I help?"),
        ("user", "1+2 and 3+4?"),
        *PARALLEL[2:3],
        ("tool", "7", "c2"),
        ("tool", "3", "c1"),
        ("assistant", "3 and 7. Look at it."),
        ("user", "Good."),
        ("assistant", "Bye."),
    ]
    assert (conversation.teacher, conversation.category) == ("some-model", "agent")
    assert cut_at_mismatch(conversation) == conversation
    assert isinstance(refused, RowError) and "unknown role 'robot'" in str(refused)
    assert not format_.is_part({"simulations": [{"heading": "x"}], "info": {}})


def test_tags_that_end_an_adp_trajectory_are_no_text():
    items = [
        {"class_": "text_observation", "source": "user", "content": "Go."},
        {"class_": "message_action", "content": "<finish> Done:\n<finish>. </finish>\n"},
    ]
    _, conversation = recogniser().read({"id": "a", "content": items})
    assert conversation.messages[-1].content == "Done:\n<finish>."


def read_summary(row):
    return summary(recogniser().read(row)[1])


def test_what_stands_beside_a_pair():
    first, last = [("user", "1?"), ("assistant", "One.")], ("assistant", "Three.")
    row = {"instruction": "3?", "input": "", "output": "Three.", "history": [["1?", "One."]]}
    assert read_summary(row) == [*first, ("user", "3?"), last]
    row = {"instruction": "Sum up.", "context": "A text.", "response": "Three."}
    assert read_summary(row) == [("user", "Sum up.\n\nA text."), last]
    _, refused = recogniser().read({"query": "3?", "response": "Three.", "history": ["1?"]})
    assert isinstance(refused, RowError) and "history" in str(refused)
    judged = {"prompt": "1?", "completion": "Two.", "label": False}
    assert isinstance(recogniser().read(judged)[1], Note)
    for label in (True, 0, None):
        assert read_summary(judged | {"label": label})[-1] == ("assistant", "Two.")


def test_calls_as_text():
    calls = OPENAI[2]["tool_calls"]
    for spelling in (json.dumps(calls), [json.dumps(call) for call in calls]):
        turns = [*OPENAI[:2], OPENAI[2] | {"tool_calls": spelling}, *OPENAI[3:]]
        assert read_summary({"messages": turns, "tools": [SCHEMA]}) == PARALLEL
    for broken in ("[", "3", '"x"', ["["], ["3"]):
        turns = [*OPENAI[:2], OPENAI[2] | {"tool_calls": broken}]
        assert isinstance(recogniser().read({"messages": turns})[1], RowError)


def test_code_under_its_own_key():
    name, document = recogniser().read({"code": "x = 1\n", "language": "python"})
    assert (name, document.text) == ("code-rows", "x = 1\n")
    assert recogniser().read({"code": "x = 1\n"})[0] == "unknown"
