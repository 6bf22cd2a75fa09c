"""Packing of stacked experts: modelopt's bytes, and those of the format in plain Python."""

import contextlib
import io
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_reference import pack_in_python
from torch import nn

from graft.errors import UserError
from graft.formats import dequantize_nvfp4
from quantize import packing
from quantize.packing import WeightScales, fake_quantize, largest, pack


def modelopt_tensor():
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    return NVFP4QTensor


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


stacks = st.fixed_dictionaries(
    {
        "shape": st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([16, 32, 80])),
        "dtype": st.sampled_from([torch.bfloat16, torch.float32]),
        "spread": st.sampled_from([1e-6, 0.02, 1.0, 3e4]),
        "kind": st.sampled_from(["normal", "zero blocks", "outliers", "ties", "tiny blocks"]),
        "seed": st.integers(0, 2**31),
    }
)


def stack(shape, dtype, spread, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    if kind == "zero blocks":
        weight.view(-1, 16)[::2] = 0
        weight[0, 0, 0] = 1.0  # an expert of zeros has a test of its own
    if kind == "outliers":
        weight.view(-1)[:: shape[2] + 3] *= 5000
    if kind == "tiny blocks":
        weight.view(-1, 16)[::2] *= 1e-7
    if kind == "ties":  # on the bounds between codes, where block scales are powers of two
        grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
        weight = grid[torch.randint(0, 8, shape, generator=generator)] * weight.sign()
        weight[..., 0] = 6 * 448 / 2 ** torch.randint(0, 9, shape[:2], generator=generator)
        spread = 1.0
    return (weight * spread).to(dtype)


@settings(max_examples=60, deadline=None)
@given(stacks)
def test_bytes_and_scales_are_modelopt_s(drawn):
    weight = stack(**drawn)
    amax = largest(weight)
    keep = amax > 0
    packed = pack(weight, WeightScales(amax=amax))
    for expert in keep.nonzero().flatten().tolist():
        tensor, scale, scale_2 = modelopt_tensor().quantize(weight[expert].clone(), 16)
        assert torch.equal(packed.weight[expert], tensor._quantized_data)
        assert torch.equal(bits(packed.weight_scale[expert]), bits(scale))
        assert torch.equal(packed.weight_scale_2[expert], scale_2.squeeze())


@settings(max_examples=15, deadline=None)
@given(stacks)
def test_bytes_and_scales_are_those_of_the_plain_rendering(drawn):
    weight = stack(**drawn | {"shape": (2, 2, 32)})
    amax = largest(weight)
    packed = pack(weight, WeightScales(amax=amax))
    for expert in range(2):
        if not amax[expert]:
            continue
        wanted, scales, scale_2 = pack_in_python(weight[expert], amax[expert].item())
        assert torch.equal(packed.weight[expert], wanted)
        assert packed.weight_scale[expert].float().flatten().tolist() == scales
        assert torch.equal(packed.weight_scale_2[expert], scale_2)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("chosen", [False, True])
def test_pieces_and_threads_change_nothing(num_threads, chosen, monkeypatch):
    """Real experts take many pieces; 21 rows here, two a piece."""
    weight = stack((3, 7, 80), torch.float32, 1.0, "normal", 2)
    own = weight.unflatten(-1, (-1, 16)).abs().amax(-1)
    scales = WeightScales(amax=largest(weight), block_amax=own * 0.8 if chosen else None)
    whole = pack(weight, scales)
    monkeypatch.setitem(packing.PIECE, "cpu", 160)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    pieces = pack(weight, scales)
    assert torch.equal(pieces.weight, whole.weight)
    assert torch.equal(bits(pieces.weight_scale), bits(whole.weight_scale))


def test_the_comparison_sees_one_value_that_rounds_the_other_way():
    weight = stack((2, 3, 32), torch.float32, 1.0, "normal", 1)
    amax = largest(weight)
    wanted, _, _ = pack_in_python(weight[0], amax[0].item())
    off = weight.clone()
    step = off[0, 0, :16].abs().max() / 6
    off[0, 0, 1] = off[0, 0, 1].sign() * (off[0, 0, 1].abs() + 2 * step)
    packed = pack(off, WeightScales(amax=amax))
    assert not torch.equal(packed.weight[0], wanted)
    assert not torch.equal(pack(weight, WeightScales(amax=2 * amax)).weight_scale_2, amax / 2688)


class Experts(nn.Module):
    """Fused experts as modelopt recognises them."""

    def __init__(self, gate_up, down):
        super().__init__()
        self.num_experts, self.intermediate_dim = gate_up.shape[0], gate_up.shape[1] // 2
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
        self.act_fn = nn.SiLU()

    def forward(self, hidden):
        for expert in range(self.num_experts):
            gate, up = nn.functional.linear(hidden, self.gate_up_proj[expert]).chunk(2, dim=-1)
            out = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_packs_as_modelopt_s_own_export_of_fused_experts(dtype):
    from quantize.calibration import quantizer_config, quiet

    gate_up = stack((3, 32, 48), dtype, 0.02, "outliers", 2)
    down = stack((3, 48, 16), dtype, 0.02, "zero blocks", 3)
    down[1, 0, 0] = 0.5
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = Experts(gate_up.clone(), down.clone())
    with quiet():
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.moe_utils import _export_fused_experts

        data = torch.randn(4, 48).to(dtype)
        mtq.quantize(
            model,
            quantizer_config("w4a4"),
            lambda m: m.mlp.experts(data),
        )
        _export_fused_experts(model.mlp.experts, dtype)
    exported = model.mlp.experts.state_dict()
    first = pack(gate_up, WeightScales(amax=largest(gate_up)))
    parts = {
        "gate_proj": first.rows(0, 16),
        "up_proj": first.rows(16, 32),
        "down_proj": pack(down, WeightScales(amax=largest(down))),
    }
    for expert in range(3):
        for name, packed in parts.items():
            for part in ("weight", "weight_scale", "weight_scale_2"):
                found = getattr(packed, part)[expert].contiguous()
                wanted = exported[f"{expert}.{name}.{part}"].reshape(found.shape)
                assert torch.equal(bits(found.reshape(-1)), bits(wanted.reshape(-1))), (name, part)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_block_scales_that_an_algorithm_chose_are_modelopt_s(four_over_six):
    weight = stack((2, 4, 64), torch.bfloat16, 0.02, "outliers", 4)
    amax = largest(weight)
    own = weight.float().unflatten(-1, (-1, 16)).abs().amax(-1)
    factor = torch.tensor([1.0, 1.5, 0.75, 1.0]).expand(own.shape)
    chosen = own * factor
    chosen[0, 0, 0] = 0.0
    scale_max = 256.0 if four_over_six else 448.0
    packed = pack(weight, WeightScales(amax=amax, block_amax=chosen, scale_max=scale_max))
    for expert in range(2):
        quantizer = SimpleNamespace(
            global_amax=amax[expert],
            _amax=chosen[expert].clone(),
            block_sizes={-1: 16, "four_over_six": four_over_six},
        )
        kind = modelopt_tensor()
        scale, scale_2 = kind.get_weights_scaling_factor_from_quantizer(quantizer, weight[expert])
        tensor, _, _ = kind.quantize(weight[expert].clone(), 16, scale, scale_2)
        assert torch.equal(packed.weight_scale_2[expert], scale_2)
        assert torch.equal(bits(packed.weight_scale[expert]), bits(scale))
        assert torch.equal(packed.weight[expert], tensor._quantized_data)


def test_an_expert_of_zeros_has_sound_scales_and_stays_zero():
    weight = torch.zeros(2, 4, 32)
    weight[1] = torch.randn(4, 32)
    packed = pack(weight, WeightScales(amax=largest(weight)))
    assert packed.weight_scale_2.isfinite().all() and (packed.weight_scale_2 > 0).all()
    assert (packed.weight_scale[0].float() == 1).all()
    found = dequantize_nvfp4(packed.weight[0], packed.weight_scale[0], packed.weight_scale_2[0])
    assert torch.equal(found, torch.zeros(4, 32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value):
    weight = torch.randn(2, 4, 32).bfloat16()
    weight[1, 2, 3] = value
    with pytest.raises(UserError, match="finite"):
        pack(weight, WeightScales(amax=torch.ones(2)))


def test_columns_that_fill_no_blocks_are_refused():
    with pytest.raises(UserError, match="16 columns"):
        pack(torch.randn(1, 4, 24), WeightScales(amax=torch.ones(1)))


@settings(max_examples=20, deadline=None)
@given(stacks)
def test_fake_quantized_values_are_the_packed_ones(drawn):
    weight = stack(**drawn).float()
    amax = largest(weight)
    packed = pack(weight, WeightScales(amax=amax))
    for expert in range(weight.shape[0]):
        found = dequantize_nvfp4(
            packed.weight[expert], packed.weight_scale[expert], packed.weight_scale_2[expert]
        )
        assert torch.equal(found, fake_quantize(weight[expert], amax[expert]))


@pytest.mark.parametrize("algorithm", ["mse", "four_over_six"])
def test_scales_of_static_quantizers_are_read_as_modelopt_exports_them(algorithm):
    """What mse, local_hessian and four-over-six leave behind, without the CUDA kernels they need:
    static quantizers whose block scales are moved by hand."""
    from quantize.calibration import calibrate, quantizer_config, quiet, read_scales

    generator = torch.Generator().manual_seed(5)
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = Experts(
        stack((2, 32, 48), torch.float32, 0.02, "outliers", 2),
        stack((2, 48, 16), torch.float32, 0.02, "normal", 3),
    )
    experts = model.mlp.experts
    weights = {n: getattr(experts, n).detach().clone() for n in ("gate_up_proj", "down_proj")}
    with quiet(), patch("quantize.calibration.quantizer_config") as config:
        config.return_value = quantizer_config("w4a16", algorithm) | {"algorithm": "max"}
        calibrate(model, lambda m: None, "w4a16", algorithm)
        from modelopt.torch.quantization.nn.modules.tensor_quantizer import NVFP4StaticQuantizer

        for name in weights:
            for expert, quantizer in enumerate(getattr(experts, f"{name}_weight_quantizers")):
                whole = weights[name][expert].abs().amax()
                NVFP4StaticQuantizer.from_tensor_quantizer(quantizer, global_amax=whole)
                factors = torch.rand(quantizer.amax.shape, generator=generator) * 0.5 + 0.75
                quantizer.amax = quantizer.amax * factors
        scales = read_scales(experts, "w4a16")
        from modelopt.torch.export.moe_utils import _export_fused_experts

        _export_fused_experts(experts, torch.float32)
    exported = experts.state_dict()
    packed = {name: pack(weights[name], scales[name].weight) for name in weights}
    parts = {
        "gate_proj": packed["gate_up_proj"].rows(0, 16),
        "up_proj": packed["gate_up_proj"].rows(16, 32),
        "down_proj": packed["down_proj"],
    }
    assert scales["down_proj"].weight.block_amax is not None
    for expert in range(2):
        for name, part in parts.items():
            for kind in ("weight", "weight_scale", "weight_scale_2"):
                found = getattr(part, kind)[expert].float()
                wanted = exported[f"{expert}.{name}.{kind}"].float().reshape(found.shape)
                assert torch.equal(found, wanted), (name, kind)
