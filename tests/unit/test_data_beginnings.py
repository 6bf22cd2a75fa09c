"""A log of requests holds a conversation once a turn: the longest is kept, nothing else is lost."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from data_helpers import make_base, write_jsonl

from mtp.data import dedup
from mtp.data.prepare import prepare
from mtp.data.store import load_prepared

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REASON = "beginning of a longer conversation"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "b", "qwen35")


def requests(name, num_requests, **fields):
    """What a proxy writes: each request with all turns so far, and its response."""
    messages = [{"role": "user", "content": f"Please do the task {name} now, step by step."}]
    for number in range(num_requests):
        call = {"id": f"{name}{number}", "type": "function"}
        call["function"] = {"name": "f", "arguments": json.dumps({"n": number})}
        reply = {"role": "assistant", "content": f"{name} {number}", "tool_calls": [call]}
        row = {"messages": list(messages), "tools": [TOOL], **fields}
        yield {**row, "response": {"choices": [{"message": reply}]}}
        result = {"role": "tool", "content": f"result {number}", "tool_call_id": call["id"]}
        messages += [reply, result]


def lengths(folder):
    data = load_prepared(folder)
    return sorted(len(row) for split in data.values() for row in split["input_ids"])


@pytest.mark.parametrize("near_duplicates", ["together", "drop"])
def test_only_the_longest_is_kept(base, tmp_path, near_duplicates):
    rows = [*requests("one", 5), *requests("two", 3), *requests("three", 1)]
    random.Random(0).shuffle(rows)
    source = write_jsonl(tmp_path / "log.jsonl", rows)
    settings = {"held_out_percent": 0, "near_duplicates": near_duplicates}
    report = prepare(base, [source], tmp_path / "all", **settings)
    assert report.formats == {"request-log": 9} and report.dropped == {REASON: 6}
    longest = [*requests("one", 5)][-1:] + [*requests("two", 3)][-1:] + [*requests("three", 1)]
    source = write_jsonl(tmp_path / "longest.jsonl", longest)
    report = prepare(base, [source], tmp_path / "longest", **settings)
    assert not report.dropped and lengths(tmp_path / "all") == lengths(tmp_path / "longest")


def test_what_says_more_than_the_beginning_is_kept(base, tmp_path):
    """Other tools, or reasoning that the later requests no longer hold."""
    *_, longest = requests("one", 3)
    thinking, other = next(requests("one", 1)), [*requests("one", 2)][1]
    thinking["response"]["choices"][0]["message"]["reasoning_content"] = "Hm."
    other["tools"] = [TOOL, {"type": "function", "function": {"name": "g"}}]
    source = write_jsonl(tmp_path / "log.jsonl", [thinking, other, longest])
    report = prepare(base, [source], tmp_path / "out", held_out_percent=0)
    assert not report.dropped and report.train.rows == 3


def test_digests_that_were_seen():
    """Against Python's set, over several sizes of the table, with digests that collide in it."""
    generator = random.Random(0)
    digests = [f"{generator.randrange(1, 3001) << 40:016x}" + "f" * 48 for _ in range(8000)]
    digests += [f"{number:016x}" + "0" * 48 for number in (1, 1024, 1025, (1 << 64) - 1)]
    seen, wanted = dedup.DigestSet(), set()
    for digest in digests:
        assert seen.add(digest) is (digest not in wanted)
        wanted.add(digest)
    assert len(wanted) > 2500 and not any(map(seen.add, wanted))


def test_keys_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(dedup, "_BYTES_AT_ONCE", 16)
    file = dedup.BeginningFile(tmp_path / "keys")
    for keys in ([7], [1, 2, 3, 4], [1, 2], [], [9, 4], [1, 2], [5, 1, 7]):
        file.add(np.asarray(keys, dtype=np.uint64))
    found = file.contained()
    file.close()
    assert found.tolist() == [False, False, True, False, False, True, False]


@pytest.mark.parametrize("num_rows_at_once", [1, 7, 1000])
def test_groups_of_keys_read_in_pieces(tmp_path, monkeypatch, num_rows_at_once):
    monkeypatch.setattr(dedup, "_BYTES_AT_ONCE", num_rows_at_once * 8 * dedup.NUM_KEYS)
    keys = np.random.default_rng(0).integers(1, 900, size=(60, dedup.NUM_KEYS), dtype=np.uint64)
    file = dedup.KeyFile(tmp_path / "keys")
    assert file.groups().tolist() == []
    for some in keys:
        file.add(some)
    groups = file.groups()
    file.close()
    # Independent: rows that share a key at the same place, walked from the first one on.
    wanted = np.full(len(keys), -1)
    for first in range(len(keys)):
        waiting = [first] if wanted[first] < 0 else []
        for row in waiting:
            wanted[row] = first
            near = (keys == keys[row]).any(axis=1) & (wanted < 0)
            waiting += [other for other in np.flatnonzero(near) if other not in waiting]
    assert groups.tolist() == wanted.tolist()
    assert 1 < len(set(wanted.tolist())) < len(keys)  # some meet and some do not
    # Control: with the places mixed up, other rows meet.
    assert dedup.groups_of(keys.reshape(dedup.NUM_KEYS, -1)).tolist() != wanted.tolist()
