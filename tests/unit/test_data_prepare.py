"""The whole preparation on small sources: rows, split, report, refusals, and what is left."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from data_helpers import chat, make_base, write_jsonl

from graft.errors import UserError
from mtp.data.batches import plan_batches
from mtp.data.prepare import prepare
from mtp.data.prompts import evaluation_prompts
from mtp.data.split import is_held_out
from mtp.data.store import load_prepared


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "base", "qwen35")


@pytest.fixture(scope="module")
def mixed(base, tmp_path_factory):
    """(folder, report): 60 chats and 8 code files, a quarter of them held out."""
    folder = tmp_path_factory.mktemp("mixed")
    chats = write_jsonl(folder / "chats.jsonl", [chat(number) for number in range(60)])
    code = folder / "code"
    (code / "inner").mkdir(parents=True)
    for number in range(8):
        (code / "inner" / f"m{number}.py").write_text(f"value = {number}\n" * 100)
    (code / "empty.py").write_text("\n")
    (code / "settings.json").write_text('{"a": 1}')
    (code / "README.md").write_text("text")
    settings = {"max_length": 256, "held_out_percent": 25, "seed": 3}
    # The rows are made from one mould; that is what other tests are about.
    report = prepare(base, [chats, code], folder / "out", near_duplicates="ignore", **settings)
    return folder / "out", report


def test_rows_columns_and_masks(mixed, base):
    from transformers import AutoTokenizer

    folder, report = mixed
    data = load_prepared(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    kinds = {name: str(feature) for name, feature in data["train"].features.items()}
    assert "int32" in kinds["input_ids"] and "bool" in kinds["loss_mask"]
    for split, counts in (("train", report.train), ("held_out", report.held_out)):
        assert len(data[split]) == counts.rows > 0
        assert sum(len(row["input_ids"]) for row in data[split]) == counts.tokens
        assert sum(sum(row["loss_mask"]) for row in data[split]) == counts.supervised_tokens
        for row in data[split]:
            assert len(row["input_ids"]) == len(row["loss_mask"]) <= 256
            wanted = is_held_out(row["conversation_id"], seed=3, percent=25)
            assert wanted == (split == "held_out")
            if row["source"] == "code":
                assert all(row["loss_mask"]) and row["category"] == "code"
                continue
            ids = np.asarray(row["input_ids"])
            text = tokenizer.decode(ids[np.asarray(row["loss_mask"])])
            number = row["conversation_id"].removeprefix("chat-")
            assert text.startswith(f"Let me see.\n</think>\n\nReply 0 of {number}: so")
            assert text.endswith("<|im_end|>") and "Question" not in text


def test_report_accounts_for_every_row(mixed):
    folder, report = mixed
    manifest = json.loads((folder / "data.json").read_text())
    assert manifest["schema_version"] == 1 and len(manifest["tokenizer_sha256"]) == 64
    assert manifest["licences"] == ["unknown"]
    assert manifest["settings"]["max_length"] == 256
    stored = manifest["report"]
    assert stored == json.loads(json.dumps(report.as_dict()))
    assert stored["rows_read"] == 60 + 9
    assert stored["dropped"] == {"empty": 1}
    assert stored["ignored_files"] == {".json": 1, ".md": 1}
    assert stored["formats"] == {"openai-messages": 60, "code": 9}
    assert stored["train"]["conversations"] + stored["held_out"]["conversations"] == 60 + 8
    assert stored["rows_by_category"]["chat"] == 60 and stored["rows_by_category"]["code"] > 16
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_code_windows_tile_the_document(mixed, base):
    from transformers import AutoTokenizer

    data = load_prepared(mixed[0])
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    joined: Counter[str] = Counter()
    texts: dict[str, str] = {}
    for split in data.values():
        for row in split:
            if row["source"] == "code":
                name = row["conversation_id"]
                texts[name] = texts.get(name, "") + tokenizer.decode(row["input_ids"])
                joined[name] += 1
    assert texts == {f"code/inner/m{n}.py": f"value = {n}\n" * 100 for n in range(8)}
    assert min(joined.values()) > 1


def test_a_second_run_makes_the_same_rows(base, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(20)])
    first = tmp_path / "one"
    for out in (first, tmp_path / "two"):
        prepare(base, [source], out, held_out_percent=20)
    for split in ("train", "held_out"):
        rows = [load_prepared(out)[split].to_list() for out in (first, tmp_path / "two")]
        assert rows[0] == rows[1] and rows[0]
    assert (first / "data.json").read_bytes() == (tmp_path / "two" / "data.json").read_bytes()


def test_broken_rows_are_named_and_skipped_up_to_a_share(base, tmp_path):
    rows = [chat(number) for number in range(18)]
    rows[3:3] = ["{broken", {"messages": [{"role": "narrator", "content": "x"}]}]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    report = prepare(base, [source], tmp_path / "out", max_skip=0.1, held_out_percent=0)
    assert [(row.line, row.file) for row in report.broken] == [(4, str(source)), (5, str(source))]
    assert report.as_dict()["refused_by_reason"] == {
        "broken JSON": 1,
        "message N: unknown role 'narrator'": 1,
    }
    assert report.train.rows == 18
    assert f"{source}:4: broken JSON" in report.as_text()
    with pytest.raises(UserError, match=r"2 of 20, the first at .*a.jsonl:4: broken JSON"):
        prepare(base, [source], tmp_path / "refused", max_skip=0.09)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_calls_without_schemas_name_the_option_that_takes_them(base, tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    turns = [{"role": "user", "content": "x"}, call, {"role": "tool", "content": "y"}]
    rows = ["{broken", {"messages": [*turns, {"role": "assistant", "content": "z"}]}]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match="or pass --allow-missing-tools"):
        prepare(base, [source], tmp_path / "out")
    source = write_jsonl(tmp_path / "a.jsonl", rows[:1])
    with pytest.raises(UserError, match=r"raise --max-skip$"):
        prepare(base, [source], tmp_path / "out")


def test_duplicates_are_dropped(base, tmp_path):
    twice = [chat(1), {**chat(1), "id": "another"}, chat(2)]
    source = write_jsonl(tmp_path / "a.jsonl", twice)
    report = prepare(base, [source], tmp_path / "out", held_out_percent=0)
    assert report.train.rows == 2 and report.dropped == {"duplicate": 1}


def test_licences_reach_the_manifest(base, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{**chat(1), "license": "MIT"}, chat(2)])
    prepare(base, [source], tmp_path / "out", held_out_percent=0, default_licence="CC0-1.0")
    manifest = json.loads((tmp_path / "out" / "data.json").read_text())
    assert manifest["licences"] == ["CC0-1.0", "MIT"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"thinking": "maybe"}, "--thinking"),
        ({"max_length": 1}, "--max-length"),
        ({"held_out_percent": 100}, "held-out"),
        ({"max_skip": 7}, "--max-skip"),
    ],
)
def test_wrong_settings(base, tmp_path, settings, message):
    source = write_jsonl(tmp_path / "a.jsonl", [chat(1)])
    with pytest.raises(UserError, match=message):
        prepare(base, [source], tmp_path / "out", **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_wrong_inputs(base, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [chat(1)])
    (tmp_path / "none").mkdir()
    (tmp_path / "a.docx").write_text("x")
    surrogate = write_jsonl(tmp_path / "s.jsonl", [chat(1), {**chat(2), "id": "x"}])
    surrogate.write_text(surrogate.read_text().replace("Question 0 of 2", "\\ud800"))
    out = tmp_path / "out"
    for wrong_base, sources, message in (
        (tmp_path / "none", [source], "no tokenizer.json"),
        (base, [tmp_path / "missing"], "nothing at"),
        (base, [tmp_path / "none"], "rows or code files"),
        (base, [tmp_path / "a.docx"], "a.docx"),
        (base, [], "at least one source"),
        (base, [surrogate], "s.jsonl:2: text is not valid Unicode"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(wrong_base, sources, out, held_out_percent=0)
        assert not out.exists()
    with pytest.raises(UserError, match="apart from the input"):
        prepare(base, [tmp_path], out)


def test_a_missing_source_is_refused_before_another_is_read(base, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", [chat(1)])
    read = []
    monkeypatch.setattr("mtp.data.prepare.read_source", lambda *given: read.append(given) or [])
    with pytest.raises(UserError, match="nothing at"):
        prepare(base, [source, tmp_path / "missing"], tmp_path / "out")
    assert not read
    with pytest.raises(UserError):  # the control: there, but without a row
        prepare(base, [source], tmp_path / "out")
    assert read


def test_load_prepared_refuses_other_folders(mixed, tmp_path):
    import shutil

    with pytest.raises(UserError, match=r"no data\.json"):
        load_prepared(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(mixed[0], copy)
    (copy / "data.json").write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="version 99"):
        load_prepared(copy)
    shutil.copy(mixed[0] / "data.json", copy / "data.json")
    shutil.rmtree(copy / "held_out")
    with pytest.raises(UserError, match="splits train and held_out"):
        load_prepared(copy)


def test_evaluation_prompts(mixed, base):
    from transformers import AutoTokenizer

    folder, report = mixed
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    prompts = evaluation_prompts(folder, num_prompts=10, max_prompt_tokens=96)
    assert prompts == evaluation_prompts(folder, num_prompts=10, max_prompt_tokens=96)
    other = evaluation_prompts(folder, num_prompts=10, max_prompt_tokens=96, seed=1)
    assert len(prompts) == 10 and [p.id for p in other] != [p.id for p in prompts]
    assert {"chat", "code"} == {prompt.category for prompt in prompts}
    for prompt in prompts:
        text = tokenizer.decode(prompt.token_ids)
        conversation, _, end = prompt.id.rpartition("@")
        assert is_held_out(conversation, seed=3, percent=25)
        assert len(prompt.token_ids) == int(end) <= 96
        if prompt.category == "chat":
            assert text.endswith("<|im_start|>assistant\n<think>\n")
    chats = [prompt.id.split("@")[0] for prompt in prompts if prompt.category == "chat"]
    assert len(set(chats)) == min(len(chats), report.held_out.conversations)
    with pytest.raises(UserError, match="held-out prompts of at most 2 tokens"):
        evaluation_prompts(folder, num_prompts=10, max_prompt_tokens=2)


def test_grouping_by_length_keeps_padding_small():
    lengths = np.random.default_rng(0).integers(10, 1000, size=2000)
    plan = plan_batches(lengths, max_tokens=8192, seed=0, epoch=0)
    assert sorted(i for batch in plan for i in batch) == list(range(2000))
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in plan)
    assert lengths.sum() / padded > 0.9


def test_the_command_prints_its_report(base, tmp_path):
    from typer.testing import CliRunner

    from mtp.cli import app

    pairs = write_jsonl(tmp_path / "a.jsonl", [{"q": f"{n}?", "a": f"{n}."} for n in range(3)])
    command = ["data", "prepare", "--base", str(base), "--source", str(pairs), "--json",
               "--out", str(tmp_path / "out"), "--map", "prompt=q,response=a"]  # fmt: skip
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["schema_version"] == 1
    assert printed["by_source"][str(pairs)]["formats"] == {"mapped": 3}


def test_report_tells_what_became_of_the_rows_of_each_source(base, tmp_path):
    from data_rows import CLAUDE, OPENAI, SCHEMA

    agent = {"messages": OPENAI, "tools": [SCHEMA], "model": "teacher-1"}
    # Of other tools, else what is left of it would be the beginning of the agent's row.
    mismatch = {**agent, "tools": [SCHEMA] * 2}
    mismatch["messages"] = [*OPENAI[:3], OPENAI[4], {**OPENAI[3], "tool_call_id": "?"}]
    first = write_jsonl(tmp_path / "a.jsonl", [chat(1), {**chat(1), "id": "x"}, agent, mismatch])
    asked = {"messages": [{"role": "user", "content": "a"}], "reward": 0}
    second = write_jsonl(tmp_path / "b.jsonl", [asked, {"prompt": "b"}, "{", {"text": "c"}])
    log = write_jsonl(tmp_path / "c.jsonl", CLAUDE)
    settings = {"held_out_percent": 0, "max_skip": 0.2, "allow_missing_tools": True}
    report = prepare(base, [first, second, log], tmp_path / "out", where=["reward>=1"], **settings)
    counts = report.as_dict()["by_source"]
    assert [c["rows_read"] for c in counts.values()] == [4, 4, len(CLAUDE)]
    assert counts[str(first)]["dropped"] == {"duplicate": 1}
    assert counts[str(second)]["dropped"] == {"not reward>=1": 1, "prompts only": 1}
    assert counts[str(second)]["refused"] == {"broken JSON": 1, "unknown shape, keys: text": 1}
    assert counts[str(log)]["dropped"] == {"not a turn": 1, "on an abandoned branch": 1}
    assert [c["rows_used"] for c in counts.values()] == [3, 0, len(CLAUDE) - 2]
    for c in counts.values():
        assert c["rows_read"] == sum(c["formats"].values())
    assert report.cut_at_mismatch == 1 and report.train.rows == 5
    assert report.as_dict()["rows_by_teacher"] == {"teacher-1": 2, "claude": 1}
    assert f"{log}: {len(CLAUDE)} (claude-code {len(CLAUDE)}); not used: " in report.as_text()
    manifest = json.loads((tmp_path / "out" / "data.json").read_text())
    assert manifest["settings"]["where"] == ["reward>=1"]
    with pytest.raises(UserError, match="9 of 19"):  # the log's calls have no schemas
        prepare(base, [first, second, log], tmp_path / "refused", max_skip=0.2)
    with pytest.raises(UserError, match="none for rewards"):
        prepare(base, [first], tmp_path / "refused", where=["rewards>=1"])
    with pytest.raises(UserError, match="prompts only"):
        prepare(base, [write_jsonl(tmp_path / "d.jsonl", [asked])], tmp_path / "refused")
