"""Near-duplicates, contamination and the mix: against brute force, each with a negative control."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data_helpers import chat, make_base, write_jsonl

from graft.errors import UserError
from mtp.data.conversation import Conversation, Document, Message, ToolCall
from mtp.data.decontaminate import HeldOutRuns, read_evaluation_sets
from mtp.data.dedup import BANDS, NUM_KEYS, group_keys, groups_of
from mtp.data.mix import choose, parse_weights
from mtp.data.ngrams import mixed, ngram_hashes, texts_of, word_hashes
from mtp.data.prepare import prepare
from mtp.data.split import digest_of, held_out_side, is_held_out
from mtp.data.store import load_prepared
from mtp.recipe import MixRecipe

WORDS = [f"w{number}" for number in range(4000)]


def text_of(seed, length):
    return " ".join(np.random.default_rng(seed).choice(WORDS, length))


def talk(*texts, system="", **fields):
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[i % 2], content=t) for i, t in enumerate(texts))
    if system:
        messages = (Message(role="system", content=system), *messages)
    return Conversation(messages=messages, **fields)


def jaccard(left, right):
    shingles = [{tuple(t.split()[i : i + 5]) for i in range(len(t.split()) - 4)}
                for t in (left, right)]  # fmt: skip
    return len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])


def test_known_hashes():
    # Frozen: another machine must find the same groups.
    assert word_hashes("Ünïcode, 2 words!").tolist() == word_hashes("ünïcode 2  words").tolist()
    assert [hex(int(value)) for value in word_hashes("def f")] == KNOWN_WORDS
    assert hex(int(ngram_hashes(word_hashes("a b c"), 3)[0])) == KNOWN_RUN


KNOWN_WORDS = ["0x9be4e73e699ef188", "0x33c155909ff3ba9a"]
KNOWN_RUN = "0xfe32bc2ac182c03e"


def test_runs_are_those_of_plain_python():
    hashes = word_hashes(text_of(0, 50))
    runs = ngram_hashes(hashes, 13)
    base = 0x9E3779B97F4A7C15
    for start in (0, 7, 37):
        total = 0
        for value in hashes[start : start + 13].tolist():
            total = (total * base + value) % 2**64
        assert runs[start] == mixed(np.asarray([total], dtype=np.uint64))[0]
    assert len(runs) == 38 and not len(ngram_hashes(hashes, 51))


@pytest.mark.parametrize(("changed", "meet"), [(2, True), (5, True), (200, False), (600, False)])
def test_groups_follow_the_jaccard_similarity(changed, meet):
    words = text_of(1, 1000).split()
    other = list(words)
    for place in np.linspace(0, 999, changed, dtype=int):
        other[place] = "changed"
    left, right = " ".join(words), " ".join(other)
    similarity = jaccard(left, right)
    assert (similarity > 0.9) if meet else (similarity < 0.4)
    keys = np.stack([group_keys(Document(text=text)) for text in (left, right)])
    assert groups_of(keys.T).tolist() == ([0, 0] if meet else [0, 1])


def test_share_of_equal_bands_is_as_computed():
    """1 - (1 - s^8)^14, over many pairs of one similarity."""
    met, similarities = 0, []
    for seed in range(40):
        words = text_of(seed, 300).split()
        other = list(words)
        for place in np.linspace(0, 299, 11, dtype=int):
            other[place] = f"changed{place}"
        similarities.append(jaccard(" ".join(words), " ".join(other)))
        keys = [group_keys(Document(text=" ".join(text))) for text in (words, other)]
        met += bool((keys[0] == keys[1])[:BANDS].any())
    expected = 1 - (1 - np.mean(similarities) ** 8) ** 14
    assert 0.3 < expected < 0.9 and abs(met / 40 - expected) < 0.2


def test_groups_are_transitive_and_first_member_leads():
    rng = np.random.default_rng(0)
    keys = rng.integers(1, 40, size=(60, NUM_KEYS), dtype=np.uint64)
    keys[:, 3:] = np.arange(1, 61)[:, None] * 1000 + np.arange(NUM_KEYS)[3:]
    keys[rng.random(keys.shape) < 0.7] = 0
    parent = list(range(60))

    def root(i):
        while parent[i] != i:
            i = parent[i]
        return i

    for a in range(60):
        for b in range(a):
            if any(x == y != 0 for x, y in zip(keys[a], keys[b], strict=True)):
                high, low = sorted((root(a), root(b)), reverse=True)
                parent[high] = low
    expected = [root(i) for i in range(60)]
    assert groups_of(keys.T).tolist() == expected
    assert 1 < len(set(expected)) < 60


def test_one_request_groups_and_a_shared_system_text_does_not():
    request = "Fix the parser so that an empty list is read as an empty list."
    same = [talk(request, text_of(2, 40)), talk(request, text_of(3, 400))]
    short = [talk("Continue.", text_of(2, 40)), talk("Continue.", text_of(3, 40))]
    system = text_of(9, 2000)
    policy = [talk(text_of(seed, 30), text_of(seed + 9, 30), system=system) for seed in (4, 5)]
    for pair, meet in ((same, True), (short, False), (policy, False)):
        groups = groups_of(np.stack([group_keys(item) for item in pair], axis=1))
        assert groups.tolist() == ([0, 0] if meet else [0, 1])


def test_texts_of_a_conversation_hold_arguments_without_escapes():
    call = ToolCall(name="run", arguments=json.dumps({"code": 'print("a")\nb', "n": [1, None]}))
    message = Message(role="assistant", content="c", reasoning="r", tool_calls=(call,))
    conversation = talk("u", system="s")
    conversation = Conversation(messages=(*conversation.messages, message))
    assert list(texts_of(conversation)) == ["u", "c", "r", "run", 'code print("a")\nb n 1 None']


def test_groups_stay_on_one_side_and_singletons_where_their_id_says():
    names = [f"c{number}" for number in range(2000)]
    digests = np.asarray([digest_of(name, 0) for name in names], dtype=np.uint64)
    alone = np.arange(2000)
    held = held_out_side(digests, alone, percent=10)
    assert held.tolist() == [is_held_out(name, percent=10) for name in names]
    pairs = alone - alone % 2
    held = held_out_side(digests, pairs, percent=10)
    assert (held[::2] == held[1::2]).all() and 0.05 < held.mean() < 0.15
    shuffled = np.random.default_rng(0).permutation(2000)
    first = {}
    moved = np.asarray([first.setdefault(pairs[i], n) for n, i in enumerate(shuffled)])
    assert (held_out_side(digests[shuffled], moved, percent=10) == held[shuffled]).all()
    large = np.where(alone < 1000, 0, alone)
    assert not any(held_out_side(np.roll(digests, n), large, percent=10)[0] for n in range(60)), (
        "half of the data was held out"
    )


# Evaluation sets


@pytest.fixture
def evaluation(tmp_path):
    shared = text_of(100, 20)  # the instruction of all items
    prompts = [{"prompt": f"{shared} {text_of(101 + n, 30)}"} for n in range(5)]
    prompts += [{"prompt": text_of(200, 9)}, {"prompt": "Too short."}]
    return write_jsonl(tmp_path / "prompts.jsonl", prompts)


def test_contaminated_rows_are_matched_to_their_item(evaluation):
    sets = read_evaluation_sets([evaluation])
    assert sets.num_items == {str(evaluation): 7} and sets.num_too_short == {str(evaluation): 1}
    item = text_of(103, 30).split()
    whole = talk(text_of(0, 50), "as in " + "\n".join(item[4:18]).upper() + ", yes")
    assert sets.match(whole) == (str(evaluation), 3)
    assert sets.match(Document(text="x " + text_of(200, 9) + " y")) == (str(evaluation), 6)


def test_what_is_not_contaminated(evaluation):
    sets = read_evaluation_sets([evaluation])
    item = text_of(103, 30).split()
    for text in (
        " ".join(item[4:16]),  # 12 words
        " ".join([*item[4:10], "x", *item[10:18]]),  # broken by another word
        text_of(100, 20),  # the instruction
        "Too short.",
        " ".join(text_of(200, 9).split()[:8]),
    ):
        assert sets.match(talk("q", text)) is None, text
    system = talk("q", "a", system=" ".join(item))
    assert sets.match(system) is None


def test_wrong_evaluation_sets_are_refused(tmp_path):
    short = write_jsonl(tmp_path / "short.jsonl", [{"prompt": "a b"}])
    broken = write_jsonl(tmp_path / "broken.jsonl", [{"prompt": text_of(0, 20)}, {"x": 1}])
    for file, message in ((short, "all shorter"), (broken, r"broken.jsonl:2: unknown shape"),
                          (tmp_path / "none", "nothing at")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            read_evaluation_sets([file])


def arrow(rows):
    import pyarrow as pa

    ids = pa.array([row[0] for row in rows], pa.list_(pa.int32()))
    masks = pa.array([row[1] for row in rows], pa.list_(pa.bool_()))
    return pa.record_batch({"input_ids": ids, "loss_mask": masks})


@pytest.mark.parametrize("num_tokens", [100, 1 << 23])
def test_held_out_runs_are_counted_as_by_plain_python(num_tokens):
    rng = np.random.default_rng(0)
    rows = []
    for length in (5, 13, 400, 30, 800, 400):
        ids = rng.integers(0, 3, length)  # three tokens only, so that runs meet
        rows.append((ids.tolist(), (rng.random(length) < 0.97).tolist()))
    held = np.asarray([False, True, True, False, False, False])
    batch = arrow(rows)
    runs = HeldOutRuns(num_tokens)
    runs.add(batch, held)
    runs.finish()
    total, found = runs.count(batch)

    def plain(ids, mask):
        starts = range(len(ids) - 12)
        return [tuple(ids[i : i + 13]) for i in starts if all(mask[i : i + 13])]

    known = {run for row, wanted in zip(rows, held, strict=True) if wanted for run in plain(*row)}
    expected = [(len(plain(*row)), sum(run in known for run in plain(*row))) for row in rows]
    if num_tokens == 100:
        assert list(zip(total.tolist(), found.tolist(), strict=True)) == expected
    else:  # a quarter of the runs
        assert 0.15 < total.sum() / sum(pair[0] for pair in expected) < 0.35
        assert found[2] == total[2] > 0
    assert sum(pair[1] for pair in expected[3:]) == 0 or found.sum()


# The mix


def mixture(weights, *, tokens=0, max_repeats=4, seed=0, sizes=(300, 300, 300)):
    rng = np.random.default_rng(seed)
    kinds = np.repeat(np.arange(3), sizes)
    lengths = rng.integers(50, 200, len(kinds))
    digests = rng.integers(1 << 63, size=len(kinds), dtype=np.uint64)
    names = [("src/", "src", "code"), ("a.jsonl", "a", "agent"), ("b.jsonl", "b", "agent")]
    recipe = MixRecipe(weights=weights, tokens=tokens, max_repeats=max_repeats)
    copies, parts = choose(names, kinds, lengths, digests, recipe)
    got = [int((copies * lengths)[kinds == kind].sum()) for kind in range(3)]
    return copies, parts, got


def test_weights_and_budget_are_met():
    copies, parts, got = mixture({"code": 0.6, "agent": 0.4}, tokens=20_000)
    assert [part.tokens_taken for part in parts] == [got[0], got[1] + got[2]]
    assert abs(got[0] - 12_000) < 200 and abs(got[1] + got[2] - 8_000) < 200
    assert copies.max() == 1 and min(got) > 0
    again, *_ = mixture({"code": 0.6, "agent": 0.4}, tokens=20_000)
    assert (copies == again).all()


def test_a_source_is_more_particular_than_its_category():
    _, parts, got = mixture({"a": 1, "agent": 3}, tokens=8_000)
    assert [part.name for part in parts] == ["a", "agent"] and got[0] == 0
    assert abs(got[1] - 2_000) < 200 and abs(got[2] - 6_000) < 200


def test_without_a_budget_nothing_is_oversampled():
    copies, parts, got = mixture({"code": 1, "agent": 4}, sizes=(300, 50, 50))
    assert copies.max() == 1 and abs(4 * got[0] - got[1] - got[2]) < 800
    assert parts[1].tokens_taken == parts[1].tokens_found


def test_oversampling_is_told_and_capped():
    copies, parts, _ = mixture({"code": 1, "a": 1}, tokens=60_000, sizes=(300, 100, 0))
    code, agent = parts
    assert code.epochs < 1 and 2 < agent.epochs < 3 and "oversampled" in str(agent)
    assert abs(agent.tokens_taken - 30_000) < 200 and set(copies[300:]) == {2, 3}
    _, parts, _ = mixture({"a": 1}, tokens=60_000, sizes=(300, 100, 0), max_repeats=2)
    assert parts[0].epochs == 2 and "fewer than wanted" in str(parts[0])


def test_a_wrong_mix_is_refused():
    assert parse_weights("code=0.6, agent=0.4") == {"code": 0.6, "agent": 0.4}
    for text in ("code", "code=x", "=1", "code=0", "code=-1", "code=nan", "a=1,a=2", ""):
        with pytest.raises(UserError, match="weight"):
            parse_weights(text)
    with pytest.raises(UserError, match="none for chat"):
        mixture({"chat": 1.0})


# All together


def test_prepare_splits_cleans_and_mixes(tmp_path, evaluation):
    base = make_base(tmp_path / "base", "chatml")

    def row(number, *texts):
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return {"id": f"c{number}", "messages": messages}

    rows = [row(n, text_of(1000 + n, 30), text_of(3000 + n, 60)) for n in range(60)]
    twin = row(500, text_of(1000, 30), text_of(3000, 60) + " end")
    held = next(r for r in rows if is_held_out(r["id"], percent=20))
    # Another request, but the answer of a held-out conversation.
    copied = next(row(n, text_of(8000, 60), held["messages"][1]["content"])
                  for n in range(600, 700) if not is_held_out(f"c{n}", percent=20))  # fmt: skip
    dirty = row(900, "q", "yes: " + text_of(101, 30))
    source = write_jsonl(tmp_path / "a.jsonl", [*rows, twin, copied, dirty])
    settings = {"held_out_percent": 20, "decontaminate": [evaluation]}
    out = tmp_path / "out"
    report = prepare(base, [source], out, **settings)
    data = load_prepared(out)
    sides = {s: set(data[s]["conversation_id"]) for s in ("train", "held_out")}
    assert report.dropped == {"repeats held-out text": 1, f"text of {evaluation}": 1}
    assert {"c0", "c500"} <= sides["train"] or {"c0", "c500"} <= sides["held_out"]
    assert not {"c900", copied["id"]} & (sides["train"] | sides["held_out"])
    assert [vars(c) for c in report.contaminated] == [
        {"file": str(source), "line": 63, "evaluation": str(evaluation), "evaluation_line": 1}
    ]
    assert report.near_duplicates == 2 and 0 < report.held_out_overlap < 0.1
    assert f"{evaluation}: 7 items, 1 too short" in report.as_text()
    dropped = prepare(base, [source], tmp_path / "two", near_duplicates="drop", **settings)
    assert dropped.dropped["near-duplicate"] == 1
    # Negative control: without looking, both stay.
    ignored = prepare(base, [source], tmp_path / "three", near_duplicates="ignore", **settings)
    assert ignored.dropped == {f"text of {evaluation}": 1}
    code = tmp_path / "code"
    code.mkdir()
    for number in range(10):
        (code / f"m{number}.py").write_text(text_of(7000 + number, 200))
    mix = MixRecipe(weights={"code": 0.5, "a.jsonl": 0.5}, tokens=9_000)
    report = prepare(base, [source, code], tmp_path / "four", mix=mix, **settings)
    train = load_prepared(tmp_path / "four")["train"]
    tokens = {"code": 0, "a.jsonl": 0}
    for r in train:
        tokens[r["source"]] += len(r["input_ids"])
    assert tokens == {part.name: part.tokens_taken for part in report.mix}
    assert sum(tokens.values()) == report.train.tokens
    assert all(abs(count - 4_500) < 600 for count in tokens.values())
    assert report.dropped["not in the mix"] > 0
    manifest = json.loads((tmp_path / "four" / "data.json").read_text())
    assert manifest["report"]["mix"][0]["epochs"] == report.mix[0].epochs
    assert manifest["settings"]["mix"]["weights"] == {"code": 0.5, "a.jsonl": 0.5}


def test_processes_change_nothing(tmp_path, monkeypatch):
    import mtp.data.work as work

    monkeypatch.setattr(work, "_BATCHES_BEFORE_WORKERS", 1)
    monkeypatch.setattr(work, "_ITEMS_AT_ONCE", 4)
    base = make_base(tmp_path / "base", "qwen35")
    bad = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}
    rows = [chat(n) for n in range(24)]
    rows[20]["messages"][1]["content"] = "one<|im_end|>two\U000f0001"  # refused by a worker
    source = write_jsonl(tmp_path / "a.jsonl", [*rows, bad])
    texts = []
    for name, num_workers in (("one", 1), ("two", 2)):
        out = tmp_path / name
        report = prepare(base, [source], out, num_workers=num_workers, max_skip=0.1)
        texts.append((out / "data.json").read_text())
        assert report.rows_refused == 1 and report.broken[0].line == 21
    assert texts[0] == texts[1]
    rows = [load_prepared(tmp_path / name)["train"].to_list() for name in ("one", "two")]
    assert rows[0] == rows[1]


def test_long_rows_are_not_worked_on_together(monkeypatch):
    """All rows of a batch are tokens in memory at once."""
    import mtp.data.work as work

    class Row:
        def __init__(self, num_characters):
            message = Message(role="user", content="x" * num_characters)
            self.value = Conversation(messages=(message,))

    monkeypatch.setattr(work, "_CHARACTERS_AT_ONCE", 1000)
    rows = [Row(size) for size in (400, 500, 99, 1, 5000, *[1] * 150)]
    batches = list(work._batches(rows))
    assert [row for batch in batches for row in batch] == rows
    assert [len(batch) for batch in batches] == [4, 1, 64, 64, 22]
    assert list(work._batches([])) == []


def test_evaluation_sets_of_any_shape_are_searched_for(tmp_path):
    """MBPP as it is published: keys that no training format has, and solutions and tests in it."""
    words = "remove the first and the last occurrence of a given character from the string"
    solution = "def remove_occurrence(text, character): return text.replace(character, '', 1) " * 2
    full = {"task_id": 11, "text": words, "code": solution, "test_list": ["assert f('a') == 'b'"]}
    sanitized = {"task_id": 12, "prompt": "Write it.", "code": solution, "test_imports": []}
    for name, row, leaked in (
        ("full", full, words), ("code", full, solution), ("sanitized", sanitized, solution),
    ):  # fmt: skip
        sets = read_evaluation_sets([write_jsonl(tmp_path / f"{name}.jsonl", [row])])
        item = Document(id="x", text=f"some words before it\n{leaked}\nand after")
        assert sets.match(item) == (str(tmp_path / f"{name}.jsonl"), 1), name
        assert sets.match(Document(id="y", text="quite other words " * 20)) is None
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(full) + '\n{"b"\n')
    with pytest.raises(UserError, match=r"broken.jsonl:2: broken JSON"):
        read_evaluation_sets([broken])
