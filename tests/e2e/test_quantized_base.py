"""A head for the quantized model that will serve: trained on it, grafted onto it, verified.

Against the same training on what the packed bytes mean, written down by `packed_bases` apart from
graft's and mtp's code.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from command_line import run
from packed_bases import pack_base
from tiny_quantized import QUANTIZED, config_blocks
from training import tiny_recipe, write_training_base, write_training_data

from graft.errors import UserError
from graft.manifest import HeadFolder
from graft.plan import plan_graft
from graft.reader import Checkpoint
from mtp.history import read_history
from mtp.recipe_text import dump_recipe

# How the bytes are packed, and what the configs say of it.
KINDS = {
    "modelopt NVFP4 experts": "modelopt NVFP4",
    "compressed-tensors NVFP4": "compressed-tensors W4A4",
}


def write_configs(folder, row):
    """The config files that the quantizer of a row leaves beside these tensors."""
    tensors = load_file(folder / "model.safetensors")
    plain = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.dtype == torch.bfloat16 and tensor.dim() > 1 and "embed_tokens" not in name
    ]
    block, file = config_blocks(row, {}, plain)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": block}))
    if file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(file))


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """A folder with `plain`, `packed` and `twin`, and a head trained on each."""
    folder = tmp_path_factory.mktemp("quantized")
    write_training_base(folder / "plain")
    pack_base(folder / "plain", folder / "packed", folder / "twin", request.param)
    write_configs(folder / "packed", QUANTIZED[KINDS[request.param]])
    meaning = load_file(folder / "twin" / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in meaning.items()},
              folder / "twin" / "model.safetensors", {"format": "pt"})  # fmt: skip
    (folder / "plain" / "tokenizer.json").write_text('{"version": "1.0"}')  # as of the others
    write_training_data(folder / "data", folder / "packed")
    recipe = tiny_recipe(steps=4)
    (folder / "recipe.toml").write_text(dump_recipe(recipe))
    for base in ("packed", "twin", "plain"):
        run("train", folder / "recipe.toml", "--base", folder / base, "--data", folder / "data",
            "--out", folder / f"head-{base}", "--device", "cpu")  # fmt: skip
    return folder


def test_the_teacher_is_what_the_packed_bytes_mean(trained):
    losses = {
        base: [r["loss"] for r in read_history(trained / f"head-{base}" / "history.jsonl")]
        for base in ("packed", "twin", "plain")
    }
    # Not closer, since the warm start takes the base's last layer in bfloat16.
    assert losses["packed"] == pytest.approx(losses["twin"], rel=2e-3)
    assert losses["packed"] != pytest.approx(losses["plain"], rel=1e-2)


def test_the_head_is_grafted_onto_its_quantized_base_and_verified(trained, tmp_path):
    packed, out = trained / "packed", tmp_path / "out"
    run("graft", "--base", packed, "--head", trained / "head-packed", "--out", out)
    run("verify", out, "--base", packed)
    shard = packed / "model.safetensors"
    assert (out / shard.name).read_bytes() == shard.read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 2
    assert config["quantization_config"]["quant_method"]
    head = {n: Checkpoint(out).load(n) for n in Checkpoint(out).head_names}
    trained_tensors = HeadFolder(trained / "head-packed").load_all()
    name = "mtp.fc.weight"
    assert torch.equal(head[name], trained_tensors[name])


def test_a_head_of_the_unquantized_base_is_not_taken_for_it(trained):
    with pytest.raises(UserError, match="quantization"):
        plan_graft(trained / "packed", trained / "head-plain")
