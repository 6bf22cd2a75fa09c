"""One block from the definitions, in float64 and Python integers: no torch arithmetic, no FP8 cast.

The other references repeat modelopt's float32 operations. Here every scale and code is the nearest
one to the exact value, taken from tables that are written out from the formats' bit fields (OCP
FP8 E4M3: 4 exponent bits of bias 7, 3 of mantissa; FP4 E2M1). Where float32 rounds an exact tie
the other way is not asked: no value of these blocks lies within 1e-5 of one.
"""

import numpy as np
import pytest
import torch
from tiny import write_base, write_tiny_head

from graft.convert import convert_head
from graft.formats import dequantize_nvfp4
from graft.index import write_json
from graft.manifest import HEAD_METADATA, HEAD_WEIGHTS, HeadFolder
from graft.writer import write_shard
from quantize.lazy_modelopt import modelopt_module
from quantize.packing import WeightScales, largest, pack

# Every positive finite E4M3 number: code -> value; 0x7F is NaN.
E4M3 = np.array([
    (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) if code >> 3 else (code & 7) / 8 * 2.0**-6
    for code in range(0x7F)
])  # fmt: skip
# E2M1: sign, two exponent bits of bias 1, one of mantissa.
E2M1 = np.array([
    (1 + (code & 1) / 2) * 2.0 ** ((code >> 1) - 1) if code >> 1 else (code & 1) / 2
    for code in range(8)
])  # fmt: skip
CLOSE_TO_A_TIE = 1e-5


def nearest(table, value):
    """Index of the nearest entry, and how close the runner-up is, relative to the step."""
    distances = np.abs(table - value)
    first, second = np.argsort(distances, kind="stable")[:2]
    return int(first), (distances[second] - distances[first]) / abs(table[first] - table[second])


def pack_block(block, amax):
    """Sixteen float64 weights to (bytes, E4M3 code of the block scale, tensor scale, margin)."""
    scale_2 = amax / (6 * 448)
    raw = min(max(np.abs(block).max() / (6 * scale_2), 2.0**-9), 448.0)
    scale_code, margin = nearest(E4M3, raw)
    step = E4M3[scale_code] * scale_2
    codes = []
    for value in block:
        code, close = nearest(E2M1, abs(value) / step)
        # Past the largest code there is no tie to be close to.
        margin = margin if abs(value) / step > 6 else min(margin, close)
        codes.append(code | 8 * int(value < 0 and code > 0))
    low, high = codes[::2], codes[1::2]
    return [a | b << 4 for a, b in zip(low, high, strict=True)], scale_code, scale_2, margin


def sign_of_zero(packed):
    """Codes of -0 (8) as 0: both mean the same value."""
    low, high = packed & 0xF, packed >> 4
    return np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 40.0, 1e-3], ids=["all alike", "outlier", "a quiet block"])
def test_a_block_is_the_nearest_scale_and_the_nearest_codes(dtype, spread):
    generator = torch.Generator().manual_seed(11)
    compared = 0
    for _ in range(60):
        weight = (torch.randn(1, 1, 32, generator=generator) * 0.02).to(dtype)
        weight[0, 0, :16] *= spread  # the second block is what the first is quiet or loud against
        amax = largest(weight)
        found = pack(weight, WeightScales(amax=amax))
        tensor, scale, scale_2 = modelopt_module(
            "quantization.qtensor.nvfp4_tensor"
        ).NVFP4QTensor.quantize(weight[0].clone(), 16)
        exact = weight[0, 0].double().numpy()
        for number in range(2):
            block = exact[16 * number :][:16]
            wanted, scale_code, wanted_2, margin = pack_block(block, np.abs(exact).max())
            if margin < CLOSE_TO_A_TIE:
                continue
            compared += 1
            for packed, block_scale, tensor_scale in (
                (found.weight[0, 0], found.weight_scale[0, 0], found.weight_scale_2[0]),
                (tensor._quantized_data[0], scale[0], scale_2.reshape(())),
            ):
                own = packed[8 * number :][:8].numpy()
                assert sign_of_zero(own).tolist() == sign_of_zero(np.array(wanted)).tolist()
                assert block_scale[number].view(torch.uint8).item() == scale_code
                assert tensor_scale.item() == pytest.approx(wanted_2, rel=2**-23)
    assert compared > 100


def test_the_comparison_sees_a_code_and_a_scale_that_are_off_by_one():
    block = np.linspace(-1, 1, 16) * 0.02
    wanted, scale_code, _, _ = pack_block(block, 0.02)
    step = E4M3[scale_code] * 0.02 / 2688
    assert pack_block(np.append(block[:-2], [block[-2] - step, 0.02]), 0.02)[0] != wanted
    assert pack_block(block, 0.02 * 1.2)[1] != scale_code


def test_stored_values_mean_what_the_formats_say():
    weight = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(1))
    packed = pack(weight, WeightScales(amax=largest(weight)))
    found = dequantize_nvfp4(packed.weight[0], packed.weight_scale[0], packed.weight_scale_2[0])
    scale_2 = float(packed.weight_scale_2[0])
    for row in range(2):
        for column in range(32):
            byte = int(packed.weight[0, row, column // 2])
            code = byte >> 4 if column % 2 else byte & 0xF
            scale = E4M3[int(packed.weight_scale[0, row, column // 16].view(torch.uint8))]
            value = E2M1[code & 7] * (-1 if code & 8 else 1) * scale * scale_2
            assert found[row, column].item() == pytest.approx(value, rel=1e-6)


def converted(source, form, folder):
    """The head in another NVFP4 form, written by graft's own conversion."""
    tensors = convert_head(source.infos(), source.form, form)
    folder.mkdir()
    write_shard(folder / HEAD_WEIGHTS, tensors)
    write_json(folder / HEAD_METADATA, source.metadata | {"form": form})
    return HeadFolder(folder)


def test_to_compressed_tensors_and_back_is_as_exact_as_float32_allows(tmp_path):
    """Bytes and block scales are the same; of tensor scales the other format wants 1 / x.

    In float32 several x share one reciprocal from sqrt(2) to 2, so no rule gives all of them back:
    x comes back as itself or as its neighbour, and from then on as itself.
    """
    source = HeadFolder(
        write_tiny_head(tmp_path / "head", write_base(tmp_path / "base"), form="nvfp4-modelopt")
    )
    there = converted(source, "nvfp4-compressed-tensors", tmp_path / "there")
    back = converted(there, "nvfp4-modelopt", tmp_path / "back")
    again = converted(back, "nvfp4-compressed-tensors", tmp_path / "again")
    assert sorted(back.names) == sorted(source.names) and len(there.names) == len(source.names)
    for name in source.names:
        before, after = source.load(name), back.load(name)
        if name.endswith(("weight_scale_2", "input_scale")):
            assert after.item() == pytest.approx(before.item(), rel=2**-23, abs=0), name
        else:
            assert torch.equal(before.float(), after.float()), name
    for name in there.names:
        assert torch.equal(there.load(name).float(), again.load(name).float()), name


def test_no_conversion_could_give_every_tensor_scale_back():
    """Two neighbours with one reciprocal: whatever is made of it is wrong for one of them."""
    scale = np.nextafter(np.float32(1.9), np.float32(2), dtype=np.float32)
    neighbours = [scale]
    for _ in range(8):
        neighbours.append(np.nextafter(neighbours[-1], np.float32(2), dtype=np.float32))
    reciprocals = {float(np.float32(1) / value) for value in neighbours}
    assert len(reciprocals) < len(neighbours)
