"""A quantized base, unpacked on load, against float64 and against its unquantized twin."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from packed_bases import PACKINGS, pack_base
from safetensors.torch import load_file, save_file
from tiny import BASES, write_base
from transformers import AutoModelForCausalLM

from graft.errors import UserError
from graft.reader import Checkpoint
from mtp.teacher import Teacher
from mtp.teacher.dequantize import load_dequantized
from mtp.teacher.packed import is_packed, stored_weights

IDS = torch.arange(24).reshape(2, 12) % 64
CPU = torch.device("cpu")


def plain_logits(folder, dtype):
    """By transformers alone: its own names, its own loader."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, experts_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def logits_of(teacher):
    with torch.no_grad():
        return teacher.model(input_ids=IDS, use_cache=False).logits


@pytest.fixture(scope="module", params=["hybrid MoE", "dense"])
def base(request, tmp_path_factory, random_base, random_dense_base):
    return random_base if request.param == "hybrid MoE" else random_dense_base


@pytest.mark.parametrize("packing", PACKINGS)
def test_logits_are_those_of_the_float64_meaning_of_the_bytes(base, packing, tmp_path):
    pack_base(base, tmp_path / "packed", tmp_path / "twin", packing)
    if base.name == "dense" and packing == "modelopt NVFP4 experts":
        assert not is_packed(Checkpoint(tmp_path / "packed"))  # a dense base has no experts
        return
    exact = plain_logits(tmp_path / "twin", torch.float64)
    unpacked = logits_of(Teacher.load(tmp_path / "packed", device="cpu"))
    torch.testing.assert_close(unpacked.double(), exact, rtol=1e-4, atol=1e-4 * exact.std().item())
    # The same base with other bytes is another model: the check above can fail.
    pack_base(base, tmp_path / "other", tmp_path / "other-twin", packing, seed=1)
    other = logits_of(Teacher.load(tmp_path / "other", device="cpu"))
    assert (other.double() - exact).std() > 0.1 * exact.std()


@pytest.mark.parametrize("packing", ["modelopt NVFP4 all linears", "compressed-tensors mixed"])
def test_in_bfloat16_it_is_bit_equal_to_the_dequantized_bf16_twin(random_base, packing, tmp_path):
    pack_base(random_base, tmp_path / "packed", tmp_path / "twin", packing)
    twin = {n: t.bfloat16() for n, t in load_file(tmp_path / "twin" / "model.safetensors").items()}
    save_file(twin, tmp_path / "twin" / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint(tmp_path / "packed")
    model = load_dequantized(checkpoint, device=CPU, dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.bfloat16)
    mine, theirs = model.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name
    for name, buffer in plain.named_buffers():  # rotary frequencies are no weights
        assert torch.equal(dict(model.named_buffers())[name], buffer), name


# transformers wants an index beside several files, and refuses a config with too many layer types.
REFUSED = {"several files, no index", "layer types that count the head"}


@pytest.mark.parametrize("layout", sorted(BASES.keys() - REFUSED))
def test_every_layout_loads_as_transformers_loads_it(layout, tmp_path):
    write_base(tmp_path / "base", **BASES[layout])
    checkpoint = Checkpoint(tmp_path / "base")
    model = load_dequantized(checkpoint, device=CPU, dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    assert type(model) is type(plain)
    theirs = plain.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def broken(folder, out, change):
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


EXPERT = "model.layers.1.mlp.experts.2.up_proj"
CHANGES = {
    "an expert is missing": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith(EXPERT)], f"{EXPERT}"),
    "a scale is missing": (lambda t: t.pop(f"{EXPERT}.weight_scale_2"), f"{EXPERT}.weight"),
    "a scale of nothing": (
        lambda t: t.update({"model.layers.0.odd.weight_scale": torch.ones(1)}), "odd.weight_scale"),
    "a tensor too many": (
        lambda t: t.update({"model.layers.9.input_layernorm.weight": torch.ones(32)}),
        "layers.9.input_layernorm"),
    "an expert too many": (
        lambda t: t.update({f"{EXPERT.replace('.2.', '.7.')}.weight": torch.ones(16, 32)}),
        "experts.7.up_proj"),
    "another shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(31)}), "model.norm.weight"),
    "scales of another block size": (
        lambda t: t.update({f"{EXPERT}.weight_scale": torch.ones(16, 1).to(torch.float8_e4m3fn)}),
        f"{EXPERT}.weight_scale"),
    "integers of an unknown packing": (
        lambda t: t.update({f"{EXPERT}.weight": torch.ones(16, 4, dtype=torch.int32)}),
        f"{EXPERT}.weight"),
    "fused and per expert": (
        lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": torch.ones(4, 32, 32)}),
        "layers.1.mlp.experts"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_missing_or_left_over_is_named(change, random_base, tmp_path):
    pack_base(random_base, tmp_path / "packed", tmp_path / "twin", "modelopt NVFP4 experts")
    apply, named = CHANGES[change]
    folder = broken(tmp_path / "packed", tmp_path / "broken", apply)
    with pytest.raises(UserError) as raised:
        Teacher.load(folder, device="cpu")
    assert named in str(raised.value)


def test_a_config_that_claims_quantization_over_plain_tensors_loads_the_tensors(
    random_base, tmp_path
):
    shutil.copytree(random_base, tmp_path / "claims")
    config = json.loads((tmp_path / "claims" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "claims" / "config.json").write_text(json.dumps(config))
    claimed = logits_of(Teacher.load(tmp_path / "claims", device="cpu"))
    assert torch.equal(claimed, logits_of(Teacher.load(random_base, device="cpu")))


def test_only_packed_weights_are_unpacked(random_base, tmp_path):
    pack_base(random_base, tmp_path / "packed", tmp_path / "twin", "modelopt NVFP4 experts")
    weights = stored_weights(Checkpoint(tmp_path / "packed"))
    assert {".experts." in w.name for w in weights if w.scheme} == {True}
    assert not any(".experts." in w.name for w in weights if not w.scheme)
