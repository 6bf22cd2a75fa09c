"""modelopt's packed experts against the format written out in plain Python."""

import itertools

import pytest
import torch
from nvfp4_reference import pack_in_python

from graft.errors import UserError
from graft.formats import dequantize_head, head_tensors
from graft.layout import fuse_experts
from graft.reader import Checkpoint
from mtp.head import head_from_base, save_head
from mtp.teacher import Teacher
from quantize.experts import dequantize, quantize_experts


@pytest.fixture(scope="module")
def quantized(random_base):
    torch.manual_seed(7)
    teacher = Teacher.load(random_base, device="cpu")
    head = head_from_base(Checkpoint(random_base), 2, "last")
    head.config._experts_implementation = "eager"
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
        experts = head.layers[1].mlp.experts
        experts.gate_up_proj[0, 3, :16] = 0.0  # a block of zeros
        experts.down_proj[1, 2, 5] = 8.0  # an outlier
    original = {f"mtp.{n}": t.clone() for n, t in head.state_dict().items()}
    batches = [torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))]
    tensors, config = quantize_experts(head, teacher, batches)
    return original, tensors, config


def test_names_dtypes_and_shapes_are_a_complete_nvfp4_head(quantized, random_base):
    _, tensors, config = quantized
    wanted = head_tensors(Checkpoint(random_base).text_config, 2, "nvfp4-modelopt")
    kinds = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32",
             torch.bfloat16: "BF16"}  # fmt: skip
    assert {n: (kinds[t.dtype], tuple(t.shape)) for n, t in tensors.items()} == wanted
    assert config["quant_algo"] == "NVFP4"


def test_packed_bytes_and_scales_equal_the_plain_rendering(quantized):
    original, tensors, _ = quantized
    for layer, expert in itertools.product(range(2), range(4)):
        prefix = f"mtp.layers.{layer}.mlp.experts"
        gate_up = original[f"{prefix}.gate_up_proj"][expert]
        down = original[f"{prefix}.down_proj"][expert]
        matrices = {"gate_proj": gate_up[:16], "up_proj": gate_up[16:], "down_proj": down}
        for name, weight in matrices.items():
            amax = (down if name == "down_proj" else gate_up).abs().max().item()
            packed, scales, scale_2 = pack_in_python(weight, amax)
            module = f"{prefix}.{expert}.{name}"
            assert torch.equal(tensors[f"{module}.weight_scale_2"], scale_2), module
            found = tensors[f"{module}.weight_scale"].float().flatten().tolist()
            assert found == scales, module
            assert torch.equal(tensors[f"{module}.weight"], packed), module


def test_gate_and_up_share_their_scale_and_all_scales_are_sound(quantized):
    _, tensors, _ = quantized
    for name, tensor in tensors.items():
        if name.endswith("scale") or name.endswith("scale_2"):
            assert torch.isfinite(tensor.float()).all() and (tensor.float() > 0).all(), name
        if name.endswith("gate_proj.weight_scale_2"):
            assert torch.equal(tensor, tensors[name.replace("gate_proj", "up_proj")])


def test_bug_B15_only_the_experts_change(quantized):
    original, tensors, _ = quantized
    twin = fuse_experts(dequantize_head(tensors))
    assert twin.keys() == original.keys()
    for name, tensor in twin.items():
        difference = (tensor.float() - original[name].float()).norm() / original[name].norm()
        if ".experts." in name:
            assert 0.01 < difference < 0.2, name
        else:
            assert torch.equal(tensor.float(), original[name].to(torch.bfloat16).float()), name


def test_without_calibration_data_it_is_refused(random_base):
    teacher = Teacher.load(random_base, device="cpu")
    head = head_from_base(Checkpoint(random_base), 1, "last")
    head.config._experts_implementation = "eager"
    with pytest.raises(UserError, match="input_scale"):
        quantize_experts(head, teacher, [])


def test_dequantize_refuses_a_bf16_head(random_base, tmp_path):
    head = head_from_base(Checkpoint(random_base), 1, "last")
    folder = tmp_path / "head"
    folder.mkdir()
    save_head(head, folder, base_fingerprint={}, provenance={})
    with pytest.raises(UserError, match="NVFP4"):
        dequantize(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
