"""The whole line in miniature, each stage through the command line: traces to release."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from command_line import run
from random_bases import save_random_base

from graft.manifest import HeadFolder
from graft.reader import Checkpoint

RECIPE = """
[head]
num_layers = 3
[train]
steps = 12
tokens_per_batch = 1024
learning_rate = 3e-3
warmup_steps = 2
[eval]
num_prompts = 4
max_prompt_tokens = 1000
num_tokens = 12
[quantize]
calibration_tokens = 512
"""


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    from mtp.nano.agent import record_traces
    from mtp.nano.tokenizer import build_tokenizer, render

    folder = tmp_path_factory.mktemp("line")
    record_traces(folder / "traces.jsonl", num_conversations=24, seed=1)
    conversations = [json.loads(row) for row in (folder / "traces.jsonl").read_text().splitlines()]
    renderer = build_tokenizer([])
    tokenizer = build_tokenizer([render(renderer, c) for c in conversations[:10]])
    vocab_size = -(-len(tokenizer) // 64) * 64
    base = save_random_base(folder / "base", vocab_size=vocab_size)
    tokenizer.save_pretrained(base)
    # A base from the Hub has files of the names that a release writes.
    (base / "README.md").write_text("the base's card")
    (base / "LICENSE").write_text("the base's licence")
    (folder / "recipe.toml").write_text(RECIPE)
    recipe, data = folder / "recipe.toml", folder / "data"
    run("data", "prepare", "--base", base, "--source", folder / "traces.jsonl", "--out", data,
        "--held-out-percent", 25, "--max-length", 1024)  # fmt: skip
    common = ("--base", base, "--data", data, "--recipe", recipe)
    run("train", *common, "--out", folder / "head")
    run("eval", *common, "--head", folder / "head", "--report", folder / "eval.json")
    run("quantize", *common, "--head", folder / "head", "--out", folder / "head-nvfp4",
        "--report", folder / "quantize.json")  # fmt: skip
    run("graft", "--base", base, "--head", folder / "head-nvfp4", "--out", folder / "grafted")
    run("verify", folder / "grafted", "--base", base)
    licence = Path(__file__).parents[2] / "LICENSE"
    run("release", "build", "--checkpoint", folder / "grafted", "--out", folder / "release",
        "--name", "tests/tiny", "--license", "mit", "--license-file", licence,
        "--evaluation", folder / "quantize.json")  # fmt: skip
    return folder


def test_training_lowered_the_loss(line):
    history = [json.loads(row) for row in (line / "head" / "history.jsonl").read_text().split("\n")
               if row][1:]  # fmt: skip
    assert len(history) == 12  # stops at exactly the recipe's steps (bugs.md G1)
    for position in range(3):
        losses = [record["loss_per_position"][position] for record in history]
        assert sum(losses[-3:]) < sum(losses[:3])


def test_the_same_seed_trains_the_same_head(line, tmp_path):
    run("train", "--base", line / "base", "--data", line / "data", "--recipe",
        line / "recipe.toml", "--out", tmp_path / "again")  # fmt: skip
    first, second = HeadFolder(line / "head").load_all(), HeadFolder(tmp_path / "again").load_all()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_layer_was_trained_into_something_of_its_own(line):
    head = HeadFolder(line / "head").load_all()
    name = "mtp.layers.{}.self_attn.q_proj.weight"
    start = Checkpoint(line / "base").load("model.layers.1.self_attn.q_proj.weight")
    layers = [start.to(torch.bfloat16), *(head[name.format(k)] for k in range(3))]
    assert not any(torch.equal(a, b) for i, a in enumerate(layers) for b in layers[:i])


def test_reports_agree(line):
    evaluated = json.loads((line / "eval.json").read_text())
    quantized = json.loads((line / "quantize.json").read_text())
    assert evaluated == quantized["before"] == HeadFolder(line / "head").metadata["acceptance"]
    assert quantized["bytes_after"] < quantized["bytes_before"]


def test_grafted_config_stays_harmless_to_a_stock_vllm(line):
    config = json.loads((line / "grafted" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 3
    assert "num_nextn_predict_layers" not in config


def test_release_is_complete_and_its_sums_are_true(line):
    folder = line / "release"
    listed = dict(
        reversed(row.split("  ")) for row in (folder / "SHA256SUMS").read_text().splitlines()
    )
    present = {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    assert set(listed) == present
    assert {"README.md", "LICENSE", "config.json", "tokenizer.json", "chat_template.jinja",
            "model_mtp.safetensors", "graft.manifest.json"} <= present  # fmt: skip
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    run("verify", folder, "--base", line / "base")
    # Nothing was written through a link into the checkpoint that the release came from.
    run("verify", line / "grafted", "--base", line / "base")
    assert (line / "grafted" / "README.md").read_text() == "the base's card"


def test_card_has_front_matter_numbers_and_the_serve_command(line):
    from huggingface_hub import ModelCard

    card = ModelCard.load(line / "release" / "README.md")
    assert card.data.license == "mit" and "nvfp4" in card.data.tags
    assert '"num_speculative_tokens": 3' in card.text
    quantized = json.loads((line / "quantize.json").read_text())
    for metrics in (quantized["before"], quantized["after"]):
        assert f"| {metrics['mean_accepted']:.3f} |" in card.text
    assert "{{" not in card.text and "| |" in card.text
