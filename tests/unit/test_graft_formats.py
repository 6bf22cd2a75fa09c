"""NVFP4: the meaning of the bytes, against modelopt and by hand."""

from __future__ import annotations

import pytest
import torch
from tiny import DENSE, TEXT_CONFIG, random_head

from graft.errors import UserError
from graft.formats import FORMS, dequantize_head, dequantize_nvfp4, head_form, head_tensors
from graft.layout import head_tensor_shapes


def test_codes_by_hand():
    # Low nibble is the even column; code = sign << 3 | index into 0 .5 1 1.5 2 3 4 6.
    weight = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    scale = torch.tensor([[1.5]]).to(torch.float8_e4m3fn)
    result = dequantize_nvfp4(weight, scale, torch.tensor(0.25))
    assert torch.equal(result, torch.tensor([values]) * 0.375)


def test_agrees_with_modelopt_bit_for_bit():
    tensor = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    torch.manual_seed(0)
    weight = torch.randn(24, 64)
    scale_2 = weight.abs().max() / (6 * 448)
    quantized, scale, _ = tensor.quantize(weight, 16, None, scale_2)
    theirs = quantized.dequantize(
        dtype=torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
    )
    mine = dequantize_nvfp4(quantized._quantized_data, scale, scale_2)
    assert torch.equal(mine, theirs.reshape(24, 64))
    assert (mine - weight).norm() / weight.norm() < 0.11


def test_the_twin_of_a_head_has_bf16_weights_under_the_same_names():
    head = random_head(TEXT_CONFIG, 2, "nvfp4-modelopt")
    twin = dequantize_head(head)
    assert {n: tuple(t.shape) for n, t in twin.items()} == head_tensor_shapes(
        TEXT_CONFIG, 2, "per_expert"
    )
    assert all(tensor.dtype == torch.bfloat16 for tensor in twin.values())
    assert twin["mtp.fc.weight"] is head["mtp.fc.weight"]
    name = "mtp.layers.1.mlp.experts.3.down_proj"
    parts = (head[f"{name}.{s}"] for s in ("weight", "weight_scale", "weight_scale_2"))
    assert torch.equal(twin[f"{name}.weight"], dequantize_nvfp4(*parts).bfloat16())


def test_published_tensor_count_of_an_nvfp4_head():
    big = TEXT_CONFIG | {"num_experts": 256}
    assert len(head_tensors(big, 4, "nvfp4-modelopt")) == 12_344


@pytest.mark.parametrize("form", FORMS)
def test_form_is_read_from_the_names(form):
    assert head_form(head_tensors(TEXT_CONFIG, 2, form)) == form


def test_an_nvfp4_head_needs_experts():
    with pytest.raises(UserError, match="dense"):
        head_tensors(TEXT_CONFIG | DENSE, 1, "nvfp4-modelopt")
