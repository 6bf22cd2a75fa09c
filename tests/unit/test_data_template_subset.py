"""Templates that once rendered otherwise than transformers does, or refused good rows."""

from __future__ import annotations

import random

import pytest
from data_helpers import TEMPLATES, make_base
from test_data_template import differences, num_remembered, said, some_conversation

from mtp.data import template
from mtp.data.conversation import Message, ToolCall
from mtp.data.render import Renderer, load_tokenizer


def each(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


def in_else(body: str) -> str:
    return each("{% for c in m.tool_calls or [] %}c{% else %}" + body + "{% endfor %}")


BUMP = "{% macro bump(n) %}{% set n.i = n.i + 1 %}{{ n.i }}{% endmacro %}"
OUTSIDE = {
    "length in an else": in_else("{{ loop.length }}|{{ loop.revindex }}"),
    "index in an else": in_else("{{ loop.index }}{{ loop.cycle('a', 'b') }}"),
    "changed in an else": in_else("{{ loop.changed(m.role) }}"),
    "loop to a macro": "{% macro f(l) %}{{ l.length }}{% endmacro %}" + in_else("{{ f(loop) }}"),
    "break in an else": in_else("{% if m.role == 'tool' %}{% break %}{% endif %}"),
    "joiner": "{% set o = namespace(s=none) %}"
    + each("{% if loop.first %}{% set o.s = joiner(',') %}{% endif %}{{ m.role }}")
    + "{{ o.s() }}x{{ o.s() }}",
    "cycler": "{% set o = namespace(s=none) %}"
    + each("{% if loop.first %}{% set o.s = cycler('a', 'b') %}{% endif %}{{ m.role }}")
    + "{{ o.s.next() }}",
    "namespace in a namespace": "{% set o = namespace(n=none) %}"
    + BUMP
    + each("{% if loop.first %}{% set o.n = namespace(i=0) %}{% endif %}{{ bump(o.n) }},")
    + "{{ bump(o.n) }}",
    "namespace in a list": "{% set o = namespace(l=none) %}"
    + BUMP
    + each("{% if loop.first %}{% set o.l = [namespace(i=0)] %}{% endif %}{{ bump(o.l[0]) }},")
    + "{{ bump(o.l[0]) }}",
    "alias": "{% set a = namespace(i=0) %}{% set b = namespace(i=0) %}"
    "{% if messages|length % 2 %}{% set b = a %}{% endif %}"
    + each("{% set a.i = a.i + 1 %}{{ a.i }}{{ b.i }} "),
    "identity": "{% set a = namespace(i=0) %}"
    "{% set b = a if messages|length % 2 else namespace(i=0) %}" + each("{{ a is sameas b }}"),
    "iterator": "{% set roles = messages|map(attribute='role') %}"
    + each("{{ m.role }}{{ roles|first }}"),
    "loop in a test": each("{% for c in m.tool_calls or [] if loop.length > 2 %}c{% endfor %}"),
}
FORGOTTEN = [  # those that differ if they are remembered all the same
    "length in an else",
    "joiner",
    "cycler",
    "namespace in a namespace",
    "namespace in a list",
    "alias",
    "identity",
]
ZERO = "{% set x = -0.0 if messages|length % 2 else 0.0 %}" + each("{{ x }}")
OWN_NAME = "{% set _messages = messages[1:] %}{% set remembered_loop = 1 %}" + (
    "{% for m in _messages %}{{ m.content }}{{ _messages|length }}{{ remembered_loop }}{% endfor %}"
)
INSIDE = {
    "own names": OWN_NAME,
    "minus zero": ZERO,
    "kinds of one": "{% set x = [true, 1, 1.0][messages|length % 3] %}" + each("{{ x }}"),
    "slice": "{% set messages = messages[1:] %}"
    + each("{{ m.content }}{{ messages[loop.index0 + 1].role }}"),
    "filters": each("{{ messages|selectattr('role', 'eq', 'user')|list|length }}{{ m.role }}")
    + "{% for tool in tools or [] %}{{ tool|tojson }}{% endfor %}",
    "reason": each("{{ messages[loop.index0 + 1].content.x }}"),
    "asked for": "{% set d = strftime_now('%Y') if strftime_now is defined else '' %}"
    + each("{{ d }}{{ m.content }}"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_base(tmp_path_factory.mktemp("base") / "b", "qwen35"))


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_not_listed_is_left_to_transformers(tokenizer, name):
    found, total, renderer = differences(tokenizer, OUTSIDE[name], 4)
    assert found == 0 and total > 20 and num_remembered(renderer) == 0


@pytest.mark.parametrize("name", FORGOTTEN)
def test_each_would_differ_if_remembered(tokenizer, name, monkeypatch):
    """Negative control of the subset."""
    monkeypatch.setattr(template, "is_in_subset", lambda *_: True)
    found, _, renderer = differences(tokenizer, OUTSIDE[name], 4)
    assert num_remembered(renderer) >= 1 and found > 0


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_listed_is_remembered_and_equal(tokenizer, name):
    found, total, renderer = differences(tokenizer, INSIDE[name], 6)
    assert found == 0 and total > 20 and num_remembered(renderer) >= 1


@pytest.mark.parametrize("name", ["own names", "minus zero", "reason"])
def test_what_was_found_is_seen(tokenizer, name, monkeypatch):
    """Negative control: names that a template can spell, 0.0 as -0.0, a list's stand-in named."""
    if name == "own names":
        monkeypatch.setattr(template, "_UNUSED", "_messages")
    elif name == "minus zero":
        before = template.Memory._frozen
        same = lambda self, value: value if type(value) is float else before(self, value)  # noqa: E731
        monkeypatch.setattr(template.Memory, "_frozen", same)
    else:
        alone = lambda self, index: self._loop._items[index]  # noqa: E731
        monkeypatch.setattr(template._Neighbours, "__getitem__", alone)
    assert differences(tokenizer, INSIDE[name], 6)[0] > 0


def test_a_second_template_is_checked_anew(tokenizer, monkeypatch):
    """Of two templates, the one for tools is misunderstood; 0 checks are left to the other's."""
    tokenizer.chat_template = {
        "default": TEMPLATES["chatml"].read_text(encoding="utf-8"),
        "tool_use": OUTSIDE["length in an else"],
    }
    monkeypatch.setattr(template, "is_in_subset", lambda *_: True)
    renderer = Renderer(tokenizer, num_checked=4)
    messages = (
        Message(role="user", content="q"),
        Message(role="assistant", tool_calls=(ToolCall(name="f"),)),
        Message(role="tool", content="x"),
    )
    tools = ('{"type": "function", "function": {"name": "f"}}',)
    for some in ((), tools):
        for _ in range(8):
            prefixes = renderer.prefixes(messages, some)
            for count in (1, 2, 3):
                wanted = renderer.text(messages[:count], some)
                assert prefixes.text(count) == wanted
    assert renderer.template(()).remembering is not None
    assert renderer.template(tools).remembering is None


def test_a_template_that_does_not_compile_again_is_left_to_transformers(tokenizer, monkeypatch):
    monkeypatch.setattr(template, "_UNUSED", "not a name")
    tokenizer.chat_template = OWN_NAME
    renderer = Renderer(tokenizer, num_checked=0)
    messages, tools = some_conversation(random.Random(3))
    wanted = said(renderer.text, messages, tools)
    assert said(renderer.prefixes(messages, tools).text, len(messages)) == wanted
    assert renderer.template(tools).remembering is None
