"""One layer, trained for the vLLM that repeats it: train, eval --runtime stock, graft."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from command_line import run
from random_bases import save_random_base

from graft.manifest import HeadFolder

RECIPE = """
[head]
num_layers = {layers}
warm_start = "last"
train_router = false
[loss]
kl = 0.0
ce = 0.0
e2e_tv = 1.0
[[loss.schedule]]
kl = 1.0
until = 0.5
[[loss.schedule]]
e2e_tv = 1.0
[train]
runtime = "{runtime}"
num_speculative_tokens = 3
steps = 8
tokens_per_batch = 512
learning_rate = 3e-3
warmup_steps = 1
[eval]
num_prompts = 2
max_prompt_tokens = 500
num_tokens = 6
[quantize]
calibration_tokens = 512
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    from mtp.nano.agent import record_traces
    from mtp.nano.tokenizer import build_tokenizer

    folder = tmp_path_factory.mktemp("stock")
    record_traces(folder / "traces.jsonl", num_conversations=6, seed=1)
    tokenizer = build_tokenizer([])
    base = save_random_base(folder / "base", vocab_size=-(-len(tokenizer) // 64) * 64)
    tokenizer.save_pretrained(base)
    run("data", "prepare", "--base", base, "--source", folder / "traces.jsonl", "--out",
        folder / "data", "--held-out-percent", 30, "--max-length", 512)  # fmt: skip
    return folder


@pytest.mark.parametrize(("runtime", "layers"), [("stock", 1), ("both", 3)])
def test_heads_for_a_stock_vllm_go_the_whole_way(prepared, tmp_path, runtime, layers):
    recipe, head = tmp_path / "recipe.toml", tmp_path / "head"
    recipe.write_text(RECIPE.format(runtime=runtime, layers=layers))
    common = ("--base", prepared / "base", "--data", prepared / "data", "--recipe", recipe)
    run("train", *common, "--out", head)
    for name in ("stock", "routed")[: 1 if layers == 1 else 2]:
        run("eval", *common, "--head", head, "--runtime", name, "--report", tmp_path / name)
        metrics = json.loads((tmp_path / name).read_text())
        assert metrics["runtime"] == name and len(metrics["cumulative"]) == 3
        assert metrics["num_drafts"] > 0
    folder = HeadFolder(head)
    trained_for = "stock" if runtime == "stock" else "routed"
    assert folder.metadata["acceptance"] == json.loads((tmp_path / trained_for).read_text())
    run("eval", *common, "--head", head, "--report", tmp_path / "own")
    assert json.loads((tmp_path / "own").read_text()) == folder.metadata["acceptance"]
    assert folder.num_layers == layers
    if runtime == "stock":  # quantization measures what the head was trained for
        run("quantize", *common, "--head", head, "--out", tmp_path / "nvfp4",
            "--report", tmp_path / "quantize.json")  # fmt: skip
        before = json.loads((tmp_path / "quantize.json").read_text())["before"]
        assert before == folder.metadata["acceptance"]

    records = [json.loads(row) for row in (head / "history.jsonl").read_text().splitlines()][1:]
    assert len(records[0]["loss_per_position"]) == 3
    assert ("stock_loss_per_position" in records[0]) == (runtime == "both")
    assert len(records[0]["expert_load_variation"]) == layers
    for position in range(3):  # the stages' losses are not comparable: look at KL's
        losses = [record["loss_per_position"][position] for record in records[:4]]
        assert losses[-1] < losses[0]
    # Routers were frozen: layer 0's is the base's last full-attention layer's, as it started.
    import torch

    from graft.reader import Checkpoint

    gate = Checkpoint(prepared / "base").load("model.layers.1.mlp.gate.weight")
    assert torch.equal(folder.load_all()["mtp.layers.0.mlp.gate.weight"], gate.bfloat16())

    run("graft", "--base", prepared / "base", "--head", head, "--out", tmp_path / "grafted")
    run("verify", tmp_path / "grafted", "--base", prepared / "base")
    config = json.loads((tmp_path / "grafted" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == layers
