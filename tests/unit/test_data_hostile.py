"""Rows, names and files that nobody expects: refused with a reason, never a crash."""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
from collections import Counter

import pytest
from data_helpers import chat, make_base, write_jsonl
from data_rows import CLAUDE, EVENTS, OPENAI, ROWS, TAU2

from graft.errors import UserError
from mtp.data.conversation import (
    Conversation,
    Document,
    Note,
    RowError,
    checked,
    content_digest,
    cut_at_mismatch,
)
from mtp.data.filters import RowFilter
from mtp.data.formats import FILE_FORMATS, recogniser
from mtp.data.prepare import prepare
from mtp.data.sources import Reading, read_source
from mtp.data.store import load_prepared

FOREIGN = (None, 3, "x", [3], ["x"], {"a": b"x"}, {"name": "f", "when": datetime.date(2026, 1, 1)})
LONE = "\ud800"


def paths(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


def spoilt(value):
    """The value with something foreign at each of its places, in turn."""
    for number, path in enumerate(paths(value)):
        for foreign in (FOREIGN[number % len(FOREIGN)], FOREIGN[(number + 3) % len(FOREIGN)]):
            yield replaced(value, path, foreign)


def is_sound(value):
    """Whether a reader's result is what all later steps may rely on."""
    if isinstance(value, RowError | Note | Document):
        return True
    texts = [value.id, value.licence, value.teacher, value.category]
    for message in value.messages:
        texts += [message.role, message.content, message.reasoning, message.tool_call_id]
        texts += [message.name, *(call.name for call in message.tool_calls)]
        texts += [call.id for call in message.tool_calls]
    arguments = [json.loads(call.arguments) for m in value.messages for call in m.tool_calls]
    tools = [json.loads(tool) for tool in value.tools]
    content_digest(value)
    with contextlib.suppress(RowError):
        checked(cut_at_mismatch(value))
    return (
        all(type(text) is str for text in texts)
        and all(type(value) is dict for value in arguments)
        and all(type(tool["function"]["name"]) is str for tool in tools)
    )


@pytest.mark.parametrize("name", sorted({name for name, *_ in ROWS}))
def test_a_spoilt_row_is_read_or_refused(name):
    readers, num_refused = (recogniser(), recogniser(name)), 0
    for _, row, *_ in [case for case in ROWS if case[0] == name]:
        for value in spoilt(row):
            results = [reader.read(value)[1] for reader in readers]
            assert all(map(is_sound, results)), value
            num_refused += isinstance(results[1], RowError)
    assert num_refused, "nothing was spoilt"


@pytest.mark.parametrize(
    ("name", "items"),
    [
        ("claude-code", CLAUDE),
        ("openhands-events", EVENTS),
        ("message-list", OPENAI),
        ("tau2-bench", [TAU2]),
    ],
)
def test_a_spoilt_file_is_read_or_refused(name, items):
    (format_,) = [f for f in FILE_FORMATS if f.name == name]
    results = []
    for value in spoilt(items):
        if isinstance(value, list):
            assert all(isinstance(format_.is_part(item), bool) for item in value)
            results += [part for _, part in format_.read_parts(list(enumerate(value, start=1)))]
    assert all(map(is_sound, results)) and any(isinstance(part, RowError) for part in results)
    assert any(isinstance(part, Conversation) for part in results)


def test_names_that_are_not_unicode_are_escaped(tmp_path):
    """An id with half a surrogate pair, and a file's name in Latin-1, as JSON and Linux allow."""
    folder = tmp_path / "rows"
    rows = [chat(number) for number in range(5)]
    rows[0]["id"], rows[1]["licence"], rows[2]["model"] = LONE, LONE, LONE
    rows += [{LONE: 1}, {"messages": [{"role": LONE, "content": "a"}]}]
    write_jsonl(folder / "a.jsonl", rows)
    latin = os.fsdecode(b"caf\xe9")
    (folder / "a.jsonl").rename(folder / f"{latin}.jsonl")
    (folder / f"x.{latin}").write_text("x")
    (folder / f"{latin}.py").write_text("x = 1\n" * 9)
    base = make_base(tmp_path / "base", "chatml")
    settings = {"held_out_percent": 0, "max_skip": 0.5, "num_workers": 1}
    report = prepare(base, [folder], tmp_path / "out", **settings)
    report.as_text().encode()
    assert report.rows_refused == 2 and report.train.conversations == 6
    assert report.licences[r"\ud800"] == report.teachers[r"\ud800"] == 1
    assert report.ignored_files == {r".caf\udce9": 1}
    manifest = json.loads((tmp_path / "out" / "data.json").read_text(encoding="utf-8"))
    assert manifest["report"]["refused"][0]["file"].endswith(r"caf\udce9.jsonl")
    assert r"\ud800" in load_prepared(tmp_path / "out")["train"]["conversation_id"]


def test_utf_16_is_not_one_broken_row(tmp_path):
    for encoding in ("utf-16", "utf-32"):
        source = tmp_path / f"{encoding}.jsonl"
        source.write_bytes("\n".join(json.dumps(chat(n)) for n in range(3)).encode(encoding))
        with pytest.raises(UserError, match="UTF-16 text, not UTF-8"):
            list(read_source(source, Counter(), Reading()))


def test_what_a_folder_hides_is_counted(tmp_path):
    folder = tmp_path / "rows"
    write_jsonl(folder / "a.jsonl", [chat(1)])
    write_jsonl(folder / ".hidden.jsonl", [chat(2)])
    write_jsonl(folder / ".git" / "b.jsonl", [chat(3)])
    write_jsonl(folder / "node_modules" / "c.jsonl", [chat(4)])
    write_jsonl(tmp_path / "elsewhere" / "d.jsonl", [chat(5)])
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    ignored: Counter[str] = Counter()
    assert len(list(read_source(folder, ignored, Reading()))) == 1
    assert ignored == {
        "hidden files": 1, "hidden folders": 1, "node_modules": 1, "links to folders": 2
    }  # fmt: skip


def test_rows_under_one_key(tmp_path):
    source = tmp_path / "export.json"
    rows = [chat(1), {"weird": 1}, chat(2)]
    source.write_text(json.dumps({"version": 2, "data": rows}, indent=1))
    values = [item.value for item in read_source(source, Counter(), Reading())]
    assert [type(value) for value in values] == [Conversation, RowError, Conversation]
    # Two objects are two rows, and a key that is no wrapper is none.
    for text in (json.dumps({"data": rows}) + "\n" + json.dumps(rows[0]),
                 json.dumps({"turns": rows}), json.dumps({"data": [3]})):  # fmt: skip
        source.write_text(text)
        first = next(read_source(source, Counter(), Reading()))
        assert isinstance(first.value, RowError) and "unknown shape" in str(first.value)


def test_arguments_that_json_has_not():
    deep = json.loads("[" * 90 + "]" * 90)
    deeper, deepest = "[" * 120 + "]" * 120, "[" * 900 + "]" * 900
    for arguments, reason in (
        ({"a": deep}, None),
        (json.dumps({"a": [[]] * 200}), None),
        (f'{{"a": {deeper}}}', "nested too deeply"),
        ({"a": json.loads(deeper)}, "nested too deeply"),
        ({"a": json.loads(deepest)}, "nested too deeply"),
        ({"a": float("nan")}, "not JSON compliant"),
        ('{"a": NaN}', "not JSON compliant"),
        ('{"a": 1e999}', "not JSON compliant"),
    ):
        call = {"function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
        _, value = recogniser().read({"messages": turns})
        assert isinstance(value, Conversation if reason is None else RowError), arguments
        assert reason is None or reason in str(value)


def test_conditions_on_booleans():
    for condition, row, kept in (
        ("resolved=true", True, True),
        ("resolved=True", False, False),
        ("resolved!=false", True, True),
        ("resolved=1", True, True),
        ("resolved=true", "true", True),
    ):
        assert RowFilter(condition).keeps({"resolved": row}) is kept
