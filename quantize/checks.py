"""What must hold of an NVFP4 head that was written, checked on the file.

Most of it fails silently when served: vLLM takes gate's tensor scale for up as well, reads a
missing input scale as whatever lies in memory, and dequantizes a zero scale to zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from graft.errors import UserError
from graft.formats import NVFP4_BLOCK, dequantize_nvfp4, head_tensors
from graft.manifest import HeadFolder
from quantize.layerwise import layer_tensors
from quantize.lazy_modelopt import modelopt_module
from quantize.packing import FP4_MAX, FP8_MAX, SMALLEST_FP8

MOST_NAMED = 5
PARTS = ("weight", "weight_scale", "weight_scale_2")


def check_written(
    written: HeadFolder, source: HeadFolder, *, own_scales: bool = True, sample: int = 2
) -> dict[str, Any]:
    """Check a quantized head against the head that it was made from.

    Args:
        written: the quantized head.
        source: the unquantized head.
        own_scales: block scales follow from the weights; False where an algorithm chose them.
        sample: experts of each layer whose bytes are compared with modelopt's own arithmetic,
            which is slow; spread over the layer.

    Returns:
        num_matrices, blocks_at_smallest_scale, matrices_compared.

    Raises:
        UserError: naming what does not hold.
    """
    config = source.metadata["text_config"]
    wanted = head_tensors(config, written.num_layers, written.form)
    found = {info.name: (info.dtype, info.shape) for info in written.infos()}
    _require(
        found == wanted,
        f"the {len(wanted)} tensors of a head in the form {written.form}, every matrix 2-D",
        _some(name for name in {*wanted, *found} if wanted.get(name) != found.get(name)),
    )
    modules = [
        name.removesuffix(".weight_scale") for name in found if name.endswith("weight_scale")
    ]
    smallest = sum(_check_scales(written, module) for module in modules)
    for name in (module for module in modules if module.endswith("gate_proj")):
        gate, up = (
            written.load(f"{name.replace('gate_proj', part)}.weight_scale_2")
            for part in ("gate_proj", "up_proj")
        )
        _require(torch.equal(gate, up), f"one weight_scale_2 for gate and up of {name}", "two")
    compared = 0
    for layer in range(written.num_layers):
        compared += _compare_bytes(written, source, layer, sample, own_scales)
    return {
        "num_matrices": len(modules),
        "blocks_at_smallest_scale": smallest,
        "matrices_compared": compared,
    }


def _check_scales(written: HeadFolder, module: str) -> int:
    """Every scale of a matrix finite and above 0; how many block scales are the smallest one."""
    blocks = torch.empty(0)
    for part in ("weight_scale", "weight_scale_2", "input_scale"):
        name = f"{module}.{part}"
        if name not in written:
            continue  # an absent one was seen by its name
        values = written.load(name).float()
        sound = bool((values.isfinite() & (values > 0)).all())
        _require(sound, f"a finite {name} above 0", "zero, negative or not finite values")
        blocks = values if part == "weight_scale" else blocks
    return int((blocks <= SMALLEST_FP8).sum())


def _compare_bytes(
    written: HeadFolder, source: HeadFolder, layer: int, sample: int, own_scales: bool
) -> int:
    """Dequantized bytes equal to modelopt's fake-quantized values, for some experts of a layer."""
    stacks = layer_tensors(source, layer)
    prefix = f"mtp.layers.{layer}.mlp.experts"
    if f"{prefix}.gate_up_proj" not in stacks:
        return 0
    gate_up, down = stacks[f"{prefix}.gate_up_proj"], stacks[f"{prefix}.down_proj"]
    count, half = gate_up.shape[0], gate_up.shape[1] // 2
    compared = 0
    for expert in sorted({round(i * (count - 1) / max(sample - 1, 1)) for i in range(sample)}):
        matrices = {
            "gate_proj": (gate_up[expert, :half], gate_up[expert]),
            "up_proj": (gate_up[expert, half:], gate_up[expert]),
            "down_proj": (down[expert], down[expert]),
        }
        for projection, (weight, whole) in matrices.items():
            module = f"{prefix}.{expert}.{projection}"
            parts = [written.load(f"{module}.{part}") for part in PARTS]
            if own_scales and whole.any():  # of zeros modelopt's scale is 0 / 0
                scale_2 = whole.abs().amax().float() / (FP4_MAX * FP8_MAX)
                wanted = _with_modelopt(weight, scale_2)
            else:
                wanted = _with_modelopt(weight, parts[2], parts[1])
            same = all(
                torch.equal(mine.float(), theirs.reshape(mine.shape).float())
                for mine, theirs in zip(parts, wanted[:3], strict=True)
            )
            same = same and torch.equal(dequantize_nvfp4(*parts), wanted[3])
            _require(same, f"bytes of {module} as modelopt quantizes and dequantizes it", "others")
            compared += 1
    return compared


def _with_modelopt(
    weight: torch.Tensor, scale_2: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, block scales, tensor scale, and float32 values that they mean, by modelopt."""
    kind = modelopt_module("quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    tensor, scale, scale_2 = kind.quantize(weight.clone(), NVFP4_BLOCK, scale, scale_2)
    values = tensor.dequantize(
        dtype=torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: NVFP4_BLOCK}
    )
    assert scale is not None
    return tensor._quantized_data, scale, scale_2, values


def _require(holds: bool, expected: str, found: str) -> None:
    if not holds:
        raise UserError(expected, found, "report this: the head that was written is not sound")


def _some(names: Any) -> str:
    ordered = sorted(names)
    return f"{len(ordered)} wrong: {', '.join(ordered[:MOST_NAMED])}"
