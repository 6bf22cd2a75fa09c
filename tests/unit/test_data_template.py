"""Prefixes rendered with memory against transformers' own render of each, for hostile messages."""

from __future__ import annotations

import json
import pickle
import random

import pytest
from data_helpers import TEMPLATES, make_base

from mtp.data import template
from mtp.data.conversation import Message, RowError, ToolCall
from mtp.data.plain_tokenizer import PlainTokenizer
from mtp.data.render import Renderer, load_tokenizer

NEIGHBOURS = """{%- for message in messages -%}
{%- set role = message.role -%}
{%- if loop.first or messages[loop.index0 - 1].role != role %}<{{ role }}>{% endif -%}
{{ message.content }}
{%- if loop.last or messages[loop.index0 + 1].role != role %}</{{ role }}>{% endif -%}
{%- endfor -%}"""
COUNTS = """{%- set ns = namespace(calls=0, text='') -%}
{%- macro told(x) %}{{ x }}@{{ ns.calls }}{% endmacro -%}
{%- for message in messages -%}
{%- if message.tool_calls %}{% set ns.calls = ns.calls + message.tool_calls|length %}{% endif -%}
{%- set ns.text = ns.text ~ message.role[0] -%}
{{ told(message.content) }}{{ ns.text }}{% if add_generation_prompt %}!{% endif -%}
{%- endfor -%}{{ ns.calls }}{{ ns.text }}"""
BACKWARDS = """{%- set ns = namespace(last=-1) -%}
{%- for message in messages[::-1] -%}
{%- if ns.last < 0 and message.role == 'user' -%}
{% set ns.last = messages|length - loop.index %}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{ message.role }}{% if loop.index0 > ns.last %}{{ message.reasoning_content }}{% endif -%}
{{ message.content }}{%- endfor -%}"""
NOT_KNOWN = {
    "length": "{% for message in messages %}{{ loop.length }}{{ message.content }}{% endfor %}",
    "break": "{% for message in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
    "{{ message.content }}{% endfor %}",
    "whole list": "{% for message in messages %}{{ messages[-1].content }}{% endfor %}",
    "bare loop": "{% for message in messages %}{{ loop is defined }}{% endfor %}",
    "filtered": "{% for message in messages if message.content %}{{ loop.last }}{% endfor %}",
    "else": "{% for message in messages %}{{ message.content }}{% else %}none{% endfor %}",
    "two macros": "{% if messages|length > 2 %}{% macro m() %}a{% endmacro %}{% else %}"
    "{% macro m() %}b{% endmacro %}{% endif %}{% for message in messages %}{{ m() }}{% endfor %}",
}
KNOWN = {"neighbours": (NEIGHBOURS, 1), "counts": (COUNTS, 1), "backwards": (BACKWARDS, 1)}
FILES = {name: (path.read_text(encoding="utf-8"), None) for name, path in TEMPLATES.items()}
MARKS = (
    *("<|im_end|>", "<|im_start|>assistant\n", "</think>", "<think>\n", "<tool_call>", " \n", ""),
    *("<tool_response>\nx\n</tool_response>", "{{ 1 }}", "é世", "a\nb", "word "),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_base(tmp_path_factory.mktemp("base") / "b", "qwen35"))


def some_text(generator: random.Random) -> str:
    return "".join(generator.choice(MARKS) for _ in range(generator.randrange(4)))


def some_conversation(generator: random.Random) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    messages = [Message(role="system", content=some_text(generator))] * generator.randrange(2)
    tools = [
        json.dumps({"type": "function", "function": {"name": name, "description": "<tools>"}})
        for name in "fg"[: generator.randrange(3)]
    ]
    for _ in range(generator.randrange(1, 4)):
        messages.append(Message(role="user", content=some_text(generator)))
        for _ in range(generator.randrange(3)):
            arguments = generator.choice([{}, {"a": some_text(generator)}, {"a": 1, "b": [True]}])
            call = ToolCall(name="f", arguments=json.dumps(arguments))
            calls = (call,) * generator.randrange(1, 3)
            reply = Message(role="assistant", content=some_text(generator), tool_calls=calls)
            results = [Message(role="tool", content=some_text(generator)) for _ in calls]
            messages += [reply, *results]
        thought = generator.choice(("", some_text(generator)))
        reply = Message(role="assistant", content=some_text(generator), reasoning=thought)
        messages.append(reply)
    return tuple(messages), tuple(tools)


def said(render, *arguments, **options) -> str:
    try:
        return render(*arguments, **options)
    except RowError as error:
        return f"refused: {error}"


def num_remembered(renderer: Renderer) -> int:
    remembering = renderer.template(()).remembering
    return remembering.num_remembered if remembering is not None else 0


def differences(tokenizer, source: str, num_conversations: int = 12) -> tuple[int, int, Renderer]:
    """(prefixes that differ, all, the renderer)."""
    tokenizer.chat_template = source
    renderer = Renderer(tokenizer, thinking="keep", num_checked=0)
    generator = random.Random(7)
    found, total = 0, 0
    for _ in range(num_conversations):
        messages, tools = some_conversation(generator)
        prefixes = renderer.prefixes(messages, tools)
        for count in range(1, len(messages) + 1):
            for prompt in (True, False):
                wanted = said(renderer.text, messages[:count], tools, generation_prompt=prompt)
                found += wanted != said(prefixes.text, count, generation_prompt=prompt)
                total += 1
    return found, total, renderer


@pytest.mark.parametrize("name", [*KNOWN, *FILES])
def test_all_prefixes_are_those_of_transformers(tokenizer, name):
    source, num_loops = (KNOWN | FILES)[name]
    found, total, renderer = differences(tokenizer, source)
    assert found == 0 and total > 100
    remembered = num_remembered(renderer)
    assert remembered == num_loops if num_loops else remembered >= 1


def test_a_plain_tokenizer_renders_alike(tokenizer):
    """What workers get, `bos_token` and a template of its own for tools included."""
    tools_too = "{{ bos_token }}{{ tools|length }}" + FILES["qwen35"][0]
    tokenizer.chat_template = {"default": FILES["qwen35"][0], "tool_use": tools_too}
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    plain = pickle.loads(pickle.dumps(PlainTokenizer.of(tokenizer)))
    real, ours = (Renderer(which, num_checked=0) for which in (tokenizer, plain))
    assert real.end_tokens == ours.end_tokens and "<|im_end|>" in ours.end_tokens
    generator, seen = random.Random(5), set()
    for _ in range(8):
        messages, tools = some_conversation(generator)
        wanted = said(real.text, messages, tools, generation_prompt=True)
        assert said(ours.text, messages, tools, generation_prompt=True) == wanted
        prefixes = ours.prefixes(messages, tools)
        assert said(prefixes.text, len(messages), generation_prompt=True) == wanted
        seen.add(wanted.startswith("<|endoftext|>"))
    assert seen == {True, False}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_loops_that_see_more_are_left_alone(tokenizer, name):
    found, _, renderer = differences(tokenizer, NOT_KNOWN[name], 3)
    assert found == 0 and num_remembered(renderer) == 0


@pytest.mark.parametrize("name", ["neighbours", "counts", "qwen35"])
def test_a_memory_that_forgets_nothing_is_seen(tokenizer, name, monkeypatch):
    """Negative control: iterations taken from memory although they saw something else."""
    if name == "counts":
        monkeypatch.setattr(template.Memory, "_frozen", lambda *_: None)
    else:
        keep = lambda run, items: min(len(run.texts), len(items))  # noqa: E731
        monkeypatch.setattr(template._Run, "num_valid", keep)
    assert differences(tokenizer, (KNOWN | FILES)[name][0])[0] > 0


def test_iterations_grow_with_the_conversation_not_its_square(tokenizer, monkeypatch):
    count = 0
    before = template._Loop.__init__

    def counting(*arguments):
        nonlocal count
        count += 1
        before(*arguments)

    monkeypatch.setattr(template._Loop, "__init__", counting)
    tokenizer.chat_template = FILES["qwen35"][0]
    renderer = Renderer(tokenizer, num_checked=0)
    call = (ToolCall(name="f"),)
    step = [Message(role="assistant", tool_calls=call), Message(role="tool", content="x")]
    messages = (Message(role="user", content="q"), *step * 40)
    messages = tuple(Message(**vars(message)) for message in messages)
    prefixes = renderer.prefixes(messages, ())
    for index in range(1, len(messages)):
        prefixes.text(index, generation_prompt=True)
        prefixes.text(index + 1)
    assert count < 6 * len(messages)  # two loops; a result is rendered as the last one, and again


def test_first_texts_are_compared_and_a_difference_turns_memory_off(tokenizer, monkeypatch):
    tokenizer.chat_template = FILES["chatml"][0]
    messages = (Message(role="user", content="q"), Message(role="assistant", content="a"))
    monkeypatch.setattr(template.Memory, "loop", lambda *_, **__: "wrong")
    renderer = Renderer(tokenizer, num_checked=1)
    assert renderer.prefixes(messages, ()).text(2) == renderer.text(messages, ())
    assert renderer.template(()).remembering is None
    assert renderer.prefixes(messages, ()).text(2) == renderer.text(messages, ())
    renderer = Renderer(tokenizer, num_checked=0)
    prefixes = renderer.prefixes(messages, ())
    with pytest.raises(RuntimeError, match="misunderstood"):
        for number in range(300):
            prefixes.text(1 + number % 2)
