"""Bad input through the command line: one line, exit code 1 or 2, nothing half-written."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny import write_base, write_tiny_head

import mtp.cli


@pytest.fixture
def folder(tmp_path):
    base = write_base(tmp_path / "base", nested=False, prefix="model.")
    write_tiny_head(tmp_path / "head", base)
    return tmp_path


def mtp_fails(capsys, monkeypatch, *arguments, code=1):
    """Run `mtp`, expect a user's error, and return its line."""
    monkeypatch.setattr(sys, "argv", ["mtp", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        mtp.cli.main()
    assert exit_.value.code == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("mtp: expected ") and "; found " in lines[0]
    return lines[0]


def shards(base):
    return sorted(base.glob("*.safetensors"))


def remove_a_shard(folder):
    shards(folder / "base")[1].unlink()
    return "missing"


def truncate_a_shard(folder):
    path = shards(folder / "base")[0]
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


def empty_a_shard(folder):
    path = shards(folder / "base")[0]
    path.write_bytes(b"")
    return path.name


def change_the_config(folder, **changes):
    path = folder / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def another_model_type(folder):
    change_the_config(folder, model_type="llama")
    return "llama"


def broken_config(folder):
    (folder / "base" / "config.json").write_text("{")
    return "config.json"


def without_lm_head(folder):
    base = folder / "base"
    for path in shards(base):
        tensors = load_file(path)
        if tensors.pop("lm_head.weight", None) is not None:
            save_file(tensors, path)
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("lm_head.weight", None)
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    return "lm_head"


def another_base(folder):
    shutil.rmtree(folder / "base")
    write_base(folder / "base", nested=False, prefix="model.", seed=9)
    return "another base"


def another_hidden_size(folder):
    path = folder / "head" / "head.json"
    head = json.loads(path.read_text())
    head["base_fingerprint"]["config"]["hidden_size"] = 64
    path.write_text(json.dumps(head))
    return "hidden_size"


def another_vocabulary(folder):
    path = folder / "head" / "head.json"
    head = json.loads(path.read_text())
    head["base_fingerprint"]["config"]["vocab_size"] = 99
    path.write_text(json.dumps(head))
    return "vocab_size"


def incomplete_head(folder):
    path = folder / "head" / "mtp.safetensors"
    tensors = load_file(path)
    del tensors["mtp.layers.3.self_attn.q_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    return "mtp.layers.3.self_attn.q_proj.weight"


def no_head(folder):
    shutil.rmtree(folder / "head")
    return "mtp train"


@pytest.mark.parametrize(
    "damage",
    [
        remove_a_shard, truncate_a_shard, empty_a_shard, another_model_type, broken_config,
        without_lm_head, another_base, another_hidden_size, another_vocabulary, incomplete_head,
        no_head,
    ],
    ids=lambda damage: damage.__name__,
)  # fmt: skip
def test_graft_refuses(damage, folder, capsys, monkeypatch):
    named = damage(folder)
    before = sorted(path.name for path in folder.iterdir())
    line = mtp_fails(
        capsys, monkeypatch, "graft", "--base", folder / "base", "--head", folder / "head",
        "--out", folder / "out",
    )  # fmt: skip
    assert named in line
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    "damage", [remove_a_shard, truncate_a_shard, another_model_type], ids=lambda d: d.__name__
)
def test_train_eval_and_quantize_refuse_a_broken_base(damage, folder, capsys, monkeypatch):
    named = damage(folder)
    base, data, head = folder / "base", folder / "data", folder / "head"
    for command in (
        ("train", "--base", base, "--data", data, "--out", folder / "out"),
        ("eval", "--base", base, "--data", data, "--head", head),
        ("quantize", "--base", base, "--data", data, "--head", head, "--out", folder / "out"),
    ):
        assert named in mtp_fails(capsys, monkeypatch, *command)
        assert not (folder / "out").exists()


def test_graft_does_not_overwrite_unasked(folder, capsys, monkeypatch):
    (folder / "out").mkdir()
    line = mtp_fails(
        capsys, monkeypatch, "graft", "--base", folder / "base", "--head", folder / "head",
        "--out", folder / "out",
    )  # fmt: skip
    assert "--overwrite" in line


def test_data_prepare_names_broken_rows(folder, random_base_with_tokenizer, capsys, monkeypatch):
    rows = folder / "rows.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows.write_text(json.dumps(good) + "\n{broken\n" + json.dumps({"messages": 3}) + "\n")
    line = mtp_fails(
        capsys, monkeypatch, "data", "prepare", "--base", random_base_with_tokenizer,
        "--source", rows, "--out", folder / "out",
    )  # fmt: skip
    assert "rows.jsonl:2" in line
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [
        ("--format", "alpaca", "'alpaca'"),
        ("--map", "question", "'question'"),
        ("--where", "reward", "'reward'"),
        ("--source", "hub:?split=x", "hub:?split=x"),
    ],
)
def test_data_prepare_refuses_options_that_mean_nothing(
    option, value, found, folder, random_base_with_tokenizer, capsys, monkeypatch
):
    (folder / "rows.jsonl").write_text("")
    line = mtp_fails(
        capsys, monkeypatch, "data", "prepare", "--base", random_base_with_tokenizer,
        "--source", folder / "rows.jsonl", "--out", folder / "out", option, value, code=2,
    )  # fmt: skip
    assert f"found {found}; " in line and option.removeprefix("--") in line
    assert not (folder / "out").exists()


@pytest.fixture
def random_base_with_tokenizer(folder):
    from mtp.nano.tokenizer import build_tokenizer

    build_tokenizer(["some words to learn from"]).save_pretrained(folder / "base")
    return folder / "base"


def test_data_of_another_base_is_refused(folder, random_base_with_tokenizer, capsys, monkeypatch):
    data = folder / "data"
    data.mkdir()
    (data / "data.json").write_text(json.dumps({"schema_version": 1, "tokenizer_sha256": "0" * 64}))
    line = mtp_fails(
        capsys, monkeypatch, "train", "--base", random_base_with_tokenizer, "--data", data,
        "--out", folder / "out",
    )  # fmt: skip
    assert "another" in line and not (folder / "out").exists()


def test_an_unknown_device_is_refused():
    from graft.errors import UserError
    from mtp.teacher import pick_device

    for name in ("nonsense", "cuda:99"):
        with pytest.raises(UserError, match=name):
            pick_device(name)
