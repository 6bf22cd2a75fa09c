"""Sources: what a file is, its bytes say; every kind gives the same rows; nothing is read whole."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from data_helpers import chat, write_jsonl
from data_rows import ADD, CLAUDE, EVENTS, OPENAI, SCHEMA
from hypothesis import given, settings
from hypothesis import strategies as st

import mtp.data.rows
from graft.errors import UserError
from mtp.data.conversation import Conversation, Document, Note, RowError
from mtp.data.filters import RowFilter, require_applied
from mtp.data.formats import recogniser
from mtp.data.formats.turns import is_turn
from mtp.data.rows import LostRowsError, read_rows
from mtp.data.sources import Reading, read_source


def rows_of(path: Path):
    found = []
    try:
        for line, value in read_rows(path, is_turn):
            found.append((line, f"error: {value}" if isinstance(value, RowError) else value))
    except LostRowsError as error:
        found.append((error.line, f"lost: {error}"))
    return found


def items_of(source, ignored=None, **reading):
    return list(read_source(source, Counter() if ignored is None else ignored, Reading(**reading)))


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def zstd(data: bytes) -> bytes:
    import pyarrow as pa

    return pa.Codec("zstd").compress(data, asbytes=True)


def test_json_lines_split_at_newlines_only(tmp_path):
    text = '\ufeff{"a": "x\u2028y\x85z"}\r\n\n{"b"\n'.encode() + b'{"c": "\xff"}\n{"d": 1}'
    lines = rows_of(written(tmp_path / "a.jsonl", text))
    assert lines == [
        (1, {"a": "x\u2028y\x85z"}),
        (3, "error: broken JSON"),
        (4, "error: not UTF-8"),
        (5, {"d": 1}),
    ]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.traj"])
def test_texts_of_every_layout_whatever_their_name(tmp_path, name):
    def rows(text):
        return rows_of(written(tmp_path / name, text))

    assert rows('{\n "a": 1\n}') == [(1, {"a": 1})]
    assert rows('{\n "a": [\n  {"b": 1}\n ]\n}\n{\n "c": 2\n}') == [
        (1, {"a": [{"b": 1}]}),
        (6, {"c": 2}),
    ]
    assert rows('{"a": 1}\n{"b": 2}\n') == [(1, {"a": 1}), (2, {"b": 2})]
    assert rows('{broken\n{"b": 2}\n') == [(1, "error: broken JSON"), (2, {"b": 2})]
    assert rows('\n\n[\n {"a": 1},\n\n {"b": 2}\n]\n') == [(4, {"a": 1}), (6, {"b": 2})]
    assert rows("[]") == rows("") == rows(" \n") == []
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert rows(json.dumps(messages, indent=1)) == [(1, messages)]
    both = json.dumps(messages) + "\n" + json.dumps(messages) + "\n"
    assert rows(both) == [(1, messages), (2, messages)]
    assert rows('[\n {"a": 1},\n {"b": ') == [(2, {"a": 1}), (3, "lost: broken JSON")]
    assert [value for _, value in rows('[\n {"b": ,\n {"a": 1}]')] == ["lost: broken JSON"]
    assert rows('[{"a": 1} {"b": 2}]')[-1] == (1, "lost: broken JSON after this row")
    assert rows(b'[{"a": 1}, {"b": "\xff"}]')[-1] == (1, "lost: not UTF-8")
    assert rows("[" * 100_000)[-1][1].startswith("lost: JSON nested too deeply")
    # One conversation is one row, whatever breaks inside it.
    assert rows(json.dumps(messages)[:-9]) == [(1, "error: broken JSON")]


def test_one_broken_object(tmp_path):
    assert rows_of(written(tmp_path / "a.json", '{"a": 1,\n "b" }')) == [(2, "error: broken JSON")]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=20, deadline=None)
@given(
    values=st.lists(JSON_VALUES, max_size=4),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_a_list_in_chunks_is_the_list(tmp_path_factory, values, chunk, indent, ascii_only):
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    path = tmp_path_factory.getbasetemp() / "chunks.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp.data.rows, "_CHUNK", chunk)
        read = rows_of(path)
        cut = rows_of(written(path, text[:-1].encode("utf-8", "surrogatepass")))
    if all(isinstance(value, str) or "\\u" not in json.dumps(value) for value in values):
        assert [value for _, value in read] == values
    lines = [line for line, _ in read]
    assert lines == sorted(lines) and all(line <= text.count("\n") + 1 for line in lines)
    assert str(cut[-1][1]).startswith("lost: "), "a list that is cut off is broken"


def test_memory_does_not_grow_with_the_file(tmp_path):
    filler = "so it is. " * 1000
    for name, text in (
        ("a.jsonl", "\n".join(json.dumps({"n": n, "t": filler}) for n in range(1600))),
        ("a.json", json.dumps([{"n": n, "t": filler} for n in range(1600)])),
    ):
        path = written(tmp_path / name, text)
        del text
        assert path.stat().st_size > 16e6
        tracemalloc.start()
        assert sum(1 for _ in read_rows(path, is_turn)) == 1600
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8e6, (name, peak)


def test_compressed_and_parquet_files_give_the_same_items(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [chat(number) for number in range(70)]
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    files = [
        written(tmp_path / "a.jsonl", data),
        written(tmp_path / "b.jsonl.gz", gzip.compress(data)),
        written(
            tmp_path / "named_wrongly.bin", gzip.compress(data[:99]) + gzip.compress(data[99:])
        ),
        written(tmp_path / "c.jsonl.zst", zstd(data[:777]) + zstd(data[777:])),
        written(tmp_path / "d.json.zst", zstd(json.dumps(rows, indent=1).encode())),
        tmp_path / "e.parquet",
    ]
    pq.write_table(pa.Table.from_pylist(rows), files[-1], row_group_size=50)
    wanted = [item.value.messages for item in items_of(files[0])]
    assert len(wanted) == 70
    for file in files[1:]:
        items = items_of(file)
        assert [item.value.messages for item in items] == wanted, file
        assert {item.format for item in items} == {"openai-messages"}
    assert [item.line for item in items_of(files[-1])] == list(range(1, 71))


def test_a_file_that_loses_rows_is_an_error_and_no_refused_row(tmp_path):
    data = b"\n".join(json.dumps(chat(number)).encode() for number in range(400))
    items = json.dumps([chat(number) for number in range(400)]).encode()
    for name, broken in (
        ("a.jsonl.gz", gzip.compress(data)[:-20]),
        ("b.jsonl.zst", zstd(data)[:-9]),
        ("half.jsonl.gz", gzip.compress(data)[: len(gzip.compress(data)) // 2]),
        ("damaged.jsonl.gz", gzip.compress(data)[:200] + b"\xff" * 99 + gzip.compress(data)[299:]),
        ("c.parquet", b"PAR1 and nothing else"),
        ("d.json", items.replace(b"chat-300", b'chat-"300')),
        ("e.json", items[: len(items) // 2]),
    ):
        with pytest.raises(UserError, match=rf"{name}.*(line|after line) \d+: .*lost"):
            items_of(written(tmp_path / name, broken))
    assert len(items_of(written(tmp_path / "whole.json", items))) == 400


def test_a_folder_is_read_by_suffix_and_the_rest_is_counted(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [chat(1)])
    write_jsonl(tmp_path / "inner" / "b.ndjson", [chat(2)])
    written(tmp_path / "c.json.gz", gzip.compress(json.dumps(chat(3)).encode()))
    written(tmp_path / "d.json", json.dumps(chat(4)))
    written(tmp_path / "e.tar.gz", "x")
    written(tmp_path / "notes.md", "x")
    written(tmp_path / ".hidden.jsonl", "x")
    ignored: Counter[str] = Counter()
    assert [item.value.id for item in items_of(tmp_path, ignored)] == [
        f"chat-{number}" for number in (1, 3, 4, 2)
    ]
    assert ignored == {".gz": 1, ".md": 1, "hidden files": 1}
    written(tmp_path / "code.py", "x = 1\n")
    ignored.clear()
    items = items_of(tmp_path, ignored)
    assert [item.format for item in items].count("code") == 1 and len(items) == 4
    assert ignored == {".gz": 1, ".md": 1, ".json": 1, "hidden files": 1}


def test_a_file_that_is_one_conversation(tmp_path):
    lines = write_jsonl(tmp_path / "turns.jsonl", OPENAI)
    (item,) = items_of(lines)
    assert (item.format, item.num_rows, item.line) == ("message-list", len(OPENAI), 1)
    (event_item,) = items_of(write_jsonl(tmp_path / "events.jsonl", EVENTS))
    assert (event_item.format, event_item.num_rows) == ("openhands-events", len(EVENTS))
    exported = written(tmp_path / "events.json", json.dumps(EVENTS, indent=1))
    assert items_of(exported)[0].value.messages == event_item.value.messages
    broken = write_jsonl(tmp_path / "broken.jsonl", [*OPENAI, "{"])
    (refused,) = items_of(broken)
    assert isinstance(refused.value, RowError) and refused.num_rows == len(OPENAI) + 1


def test_a_session_log_among_other_files(tmp_path):
    write_jsonl(tmp_path / "log.jsonl", CLAUDE)
    write_jsonl(tmp_path / "rows.jsonl", [chat(1)])
    items = items_of(tmp_path)
    assert sum(item.num_rows for item in items) == len(CLAUDE) + 1
    kinds = Counter((item.format, type(item.value).__name__) for item in items)
    assert kinds == {
        ("claude-code", "Conversation"): 2,
        ("claude-code", "Note"): 2,
        ("openai-messages", "Conversation"): 1,
    }


def test_saved_datasets_are_read_by_split(tmp_path):
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([chat(number) for number in range(3)])
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "two"))
    assert [item.value.id for item in items_of(tmp_path / "one")] == ["chat-0", "chat-1", "chat-2"]
    items = items_of(tmp_path / "two")
    assert [item.file for item in items[::3]] == [
        str(tmp_path / "two" / s) for s in ("train", "test")
    ]
    assert items[0].value.messages == items_of(tmp_path / "one")[0].value.messages
    (tmp_path / "two" / "train" / "state.json").unlink()
    with pytest.raises(UserError, match="save_to_disk"):
        items_of(tmp_path / "two")


def test_hub_sources_stream_at_a_pinned_revision(monkeypatch):
    import datasets

    asked = []

    def load(name, config, *, split, revision, streaming):
        asked.append((name, config, split, revision, streaming))
        if name == "me/none":
            raise FileNotFoundError("no such data set")
        return iter([chat(1), chat(2)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("mtp.data.hub._newest_revision", lambda name: "newest")
    items = items_of("hub:me/set?config=tool&split=test&revision=abc")
    assert [item.value.source for item in items] == ["me/set@abc"] * 2
    assert items[0].source == "hub:me/set?config=tool&split=test&revision=abc"
    assert items_of("hub:me/set")[0].value.source == "me/set@newest"
    assert asked == [
        ("me/set", "tool", "test", "abc", True),
        ("me/set", None, "train", "newest", True),
    ]
    for wrong in ("hub:", "hub:me/set?name=x", "hub:me/none"):
        with pytest.raises(UserError, match="hub:owner/name"):
            items_of(wrong)


def test_hub_library_reads_a_local_builder(tmp_path, monkeypatch):
    """The real `load_dataset`, streaming, on a folder instead of a name."""
    write_jsonl(tmp_path / "set" / "train.jsonl", [chat(1), chat(2)])
    monkeypatch.setattr("mtp.data.hub._newest_revision", lambda name: None)
    items = items_of(f"hub:{tmp_path / 'set'}")
    assert [item.value.messages[0].content for item in items] == [
        "Question 0 of 1?",
        "Question 0 of 2?",
    ]


def test_forced_and_mapped_formats(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "a", "r": "b"}, chat(1)])
    assert [item.format for item in items_of(path)] == ["unknown", "openai-messages"]
    mapped = items_of(path, recogniser=recogniser(mapping="prompt=q,response=r"))
    assert [item.format for item in mapped] == ["mapped", "openai-messages"]
    forced = items_of(path, recogniser=recogniser("sharegpt"))
    assert all(isinstance(item.value, RowError) for item in forced)


def test_filters(tmp_path):
    rows = [
        {**chat(number), "score": score, "meta": {"kind": kind}}
        for number, (score, kind) in enumerate([("1.0", "a"), (0.5, "a"), (2, "b"), ("n/a", "b")])
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, chat(9)])

    def kept(*conditions):
        filters = tuple(map(RowFilter, conditions))
        items = items_of(path, filters=filters)
        require_applied(filters)
        return [type(item.value).__name__[0] for item in items]

    assert kept("score>=1") == ["C", "N", "C", "R", "C"]
    assert kept("score < 1") == ["N", "C", "N", "R", "C"]
    assert kept("meta.kind=a") == ["C", "C", "N", "N", "C"]
    assert kept("meta.kind!=a", "score=2") == ["N", "N", "C", "R", "C"]
    assert isinstance(items_of(path, filters=(RowFilter("score>9"),))[0].value, Note)
    assert "meta.kind 'a'" not in str(items_of(path, filters=(RowFilter("score>9"),))[0].value)
    with pytest.raises(UserError, match="none for typo=1"):
        kept("typo=1")
    for wrong in ("score", "=1", "score~1"):
        with pytest.raises(UserError, match="--where"):
            RowFilter(wrong)
    text = items_of(path, filters=(RowFilter("meta.kind>a"),))[0].value
    assert isinstance(text, RowError) and "only numbers can be ordered" in str(text)


def test_padding_of_arrow_does_not_reach_the_conversation(tmp_path):
    """Arrow gives every struct the keys of all others, as null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    other = {
        "type": "function",
        "function": {"name": "say", "parameters": {"properties": {"t": {"x": "y"}}}},
    }
    turns = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [
            {"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}},
            {"id": "c2", "function": {"name": "say", "arguments": {"t": "x"}}}]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]  # fmt: skip
    table = pa.Table.from_pylist(
        [{"messages": turns, "tools": [SCHEMA, other]}, {"messages": turns}]
    )
    pq.write_table(table, tmp_path / "a.parquet")
    padded = table.to_pylist()[0]
    assert padded["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "t": None}
    value = items_of(tmp_path / "a.parquet")[0].value
    assert [call.arguments for call in value.messages[1].tool_calls] == ['{"a": 1}', '{"t": "x"}']
    assert "null" not in "".join(value.tools)
    assert json.loads(value.tools[0])["function"]["parameters"] == ADD


def test_missing_and_foreign_files(tmp_path):
    written(tmp_path / "a.docx", "x")
    written(tmp_path / "b.docx", b"\x1f\x8bx")
    for wrong, message in (
        (tmp_path / "none", "nothing at"),
        (tmp_path / "a.docx", "a.docx"),
        (tmp_path / "b.docx", "b.docx"),
    ):
        with pytest.raises(UserError, match=message):
            items_of(wrong)
    (item,) = items_of(written(tmp_path / "a.py", b"x = '\xff'\n"))
    assert isinstance(item.value, RowError) and item.format == "code"
    (item,) = items_of(written(tmp_path / "b.py", "x = 1\n"))
    assert isinstance(item.value, Document) and not isinstance(item.value, Conversation)
