"""The chat template follows Qwen3.5's rules, one test a rule."""

from __future__ import annotations

import pytest
from jinja2.exceptions import TemplateError

from mtp.nano.tokenizer import build_tokenizer

ASK = {"role": "user", "content": "  hello\n"}
HEAD = "<|im_start|>user\nhello<|im_end|>\n"
TOOL = {"type": "function", "function": {"name": "grep", "description": "ä <b>"}}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["a"])


@pytest.fixture(scope="module")
def render(tokenizer):
    def render(messages, **options):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    return render


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content="", **fields):
    return {"role": "assistant", "content": content, **fields}


def test_turns_are_trimmed(render):
    system = {"role": "system", "content": " be brief "}
    assert render([ASK]) == HEAD
    assert render([system, ASK]) == "<|im_start|>system\nbe brief<|im_end|>\n" + HEAD


@pytest.mark.parametrize(
    "content, text",
    [
        (None, ""),
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
        ([{"type": "image", "image": "x.png"}], "<|vision_start|><|image_pad|><|vision_end|>"),
        ([{"type": "video", "video": "x.mp4"}], "<|vision_start|><|video_pad|><|vision_end|>"),
    ],
)
def test_content_forms(render, content, text):
    expected = f"<|im_start|>user\n{text}<|im_end|>\n"
    assert render([ASK, {"role": "user", "content": content}]) == HEAD + expected


def test_missing_content_is_empty(render):
    rendered = render([ASK, {"role": "assistant"}])
    assert rendered == HEAD + "<|im_start|>assistant\n<think>\n\n</think>\n\n<|im_end|>\n"


def test_tools_open_one_system_turn_with_schemas_a_line_each(render):
    other = {"type": "function", "function": {"name": "ls"}}
    rendered = render([{"role": "system", "content": "be brief"}, ASK], tools=[TOOL, other])
    system, rest = rendered.split("<|im_end|>\n", 1)
    assert rest == HEAD
    assert system.startswith("<|im_start|>system\n# Tools\n\n")
    schemas = system.split("<tools>\n")[1].split("\n</tools>\n\n")[0].splitlines()
    assert schemas == [
        '{"type": "function", "function": {"name": "grep", "description": "ä <b>"}}',
        '{"type": "function", "function": {"name": "ls"}}',
    ]
    assert system.endswith("\n\nbe brief")
    assert rendered.count("<|im_start|>system") == 1


def test_tools_without_system_message(render):
    system = render([ASK], tools=[TOOL]).split("<|im_end|>")[0]
    assert "# Tools" in system and system == system.rstrip()


def test_call_format_and_argument_types(render):
    arguments = {
        "text": "a\nb",
        "flag": True,
        "none": None,
        "n": 3,
        "list": [1, "ä"],
        "map": {"k": 1},
    }
    rendered = render([ASK, assistant(tool_calls=[call("f", **arguments)])])
    assert rendered == HEAD + (
        "<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n<function=f>\n"
        "<parameter=text>\na\nb\n</parameter>\n"
        "<parameter=flag>\nTrue\n</parameter>\n"
        "<parameter=none>\nNone\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n"
        '<parameter=list>\n[1, "ä"]\n</parameter>\n'
        '<parameter=map>\n{"k": 1}\n</parameter>\n'
        "</function>\n</tool_call><|im_end|>\n"
    )


def test_parallel_calls_follow_content_after_a_blank_line_then_one_newline(render):
    message = assistant(" both ", tool_calls=[call("f"), call("g")], reasoning_content="why\n")
    rendered = render([ASK, message])
    assert rendered == HEAD + (
        "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nboth\n\n"
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>\n"
    )


def test_a_call_without_the_function_wrapper(render):
    wrapped = render([ASK, assistant(tool_calls=[call("f", a=1)])])
    assert render([ASK, assistant(tool_calls=[{"name": "f", "arguments": {"a": 1}}])]) == wrapped


def test_reasoning_inside_content_equals_the_field(render):
    inside = render([ASK, assistant("<think>\nwhy\n</think>\n\nanswer")])
    assert inside == render([ASK, assistant("answer", reasoning_content="why")])
    assert "<think>\nwhy\n</think>\n\nanswer<|im_end|>" in inside


def test_tool_results_are_gathered_into_one_user_turn(render):
    results = [{"role": "tool", "content": "one\n"}, {"role": "tool", "content": "two"}]
    calls = assistant(tool_calls=[call("f"), call("g")])
    rendered = render([ASK, calls, *results, assistant("done")])
    assert rendered.split("</tool_call><|im_end|>\n")[1] == (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\ndone<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "options, prompt",
    [
        ({}, "<think>\n"),
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_generation_prompt(render, options, prompt):
    rendered = render([ASK], add_generation_prompt=True, **options)
    assert rendered == HEAD + "<|im_start|>assistant\n" + prompt


def test_each_prefix_of_a_conversation_renders_to_a_prefix(render):
    messages = [
        {"role": "system", "content": "s"},
        ASK,
        assistant(tool_calls=[call("f")], reasoning_content="r"),
        {"role": "tool", "content": "t"},
        assistant("a"),
        ASK,
        assistant("b", reasoning_content="r"),
    ]
    full = render(messages, tools=[TOOL])
    for count in (2, 3, 4, 5, 6):
        prefix = render(messages[:count], tools=[TOOL])
        assert full.startswith(prefix)
        if messages[count]["role"] == "assistant":
            prompt = render(messages[:count], tools=[TOOL], add_generation_prompt=True)
            assert full.startswith(prompt)


@pytest.mark.parametrize(
    "messages, complaint",
    [
        ([], "No messages"),
        ([assistant("hi")], "no question"),
        ([{"role": "user", "content": "<tool_response>\nx\n</tool_response>"}], "no question"),
        ([ASK, {"role": "system", "content": "late"}], "must be at the beginning"),
        ([ASK, {"role": "observation", "content": "x"}], "Unknown message role"),
        ([ASK, {"role": "user", "content": [{"type": "audio", "audio": "x"}]}], "content part"),
        ([ASK, {"role": "user", "content": 3}], "Message content"),
        (
            [ASK, assistant(tool_calls=[{"function": {"name": "f", "arguments": '{"a": 1}'}}])],
            "must be a mapping",
        ),
    ],
)
def test_refusals(render, messages, complaint):
    # transformers looks at the first message itself, so an empty list is put to the template
    # as vLLM does: through a batch of one conversation.
    with pytest.raises(TemplateError, match=complaint):
        render([messages])
