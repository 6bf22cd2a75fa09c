"""Quantized twins of tiny bases: random bytes in each packing, and what they mean in float64.

The meaning is written here from the formats' descriptions, element by element, apart from graft's
and mtp's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors by suffix, float64 values


def nvfp4_modelopt(shape: tuple[int, int], generator: torch.Generator) -> Packed:
    rows, columns = shape
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.rand(rows, columns // 16, generator=generator) * 3 + 0.5
    scale = scale.to(torch.float8_e4m3fn)
    tensor_scale = torch.rand((), generator=generator) * 0.05 + 0.01
    values = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            byte = int(packed[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            value = FP4[code & 7] * (-1 if code & 8 else 1)
            block = scale[row, column // 16].double()
            values[row, column] = value * block * tensor_scale.double()
    parts = {"weight": packed, "weight_scale": scale, "weight_scale_2": tensor_scale}
    return parts | {"input_scale": torch.tensor(0.7)}, values


def nvfp4_compressed_tensors(shape: tuple[int, int], generator: torch.Generator) -> Packed:
    parts, values = nvfp4_modelopt(shape, generator)
    reciprocal = (1 / parts["weight_scale_2"]).reshape(1)
    exact = values / parts["weight_scale_2"].double() / reciprocal.double()
    return {
        "weight_packed": parts["weight"], "weight_scale": parts["weight_scale"],
        "weight_global_scale": reciprocal, "input_global_scale": torch.tensor([3.0]),
    }, exact  # fmt: skip


def fp8_block(shape: tuple[int, int], generator: torch.Generator) -> Packed:
    rows, columns = shape
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 24), -(-columns // 12), generator=generator) * 0.2 + 0.1
    values = torch.empty(shape, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            values[row, column] = (
                weight[row, column].double() * scale[row // 24, column // 12].double()
            )
    return {"weight": weight, "weight_scale_inv": scale}, values


def fp8_channel(shape: tuple[int, int], generator: torch.Generator) -> Packed:
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(shape[0], 1, generator=generator) * 0.2 + 0.1
    return {"weight": weight, "weight_scale": scale}, weight.double() * scale.double()


def fp8_tensor(shape: tuple[int, int], generator: torch.Generator) -> Packed:
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.2)
    parts = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return parts, weight.double() * scale.double()


def is_expert(name: str) -> bool:
    return ".experts." in name


def is_linear(name: str) -> bool:
    kinds = ("_proj.weight", "_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight")
    return name.endswith(kinds)


def is_attention(name: str) -> bool:
    return ".self_attn." in name and is_linear(name)


Rule = tuple[Callable[[str], bool], Callable[[tuple[int, int], torch.Generator], Packed]]
# A row: config block, and which weights are packed how (the first rule that fits).
PACKINGS: dict[str, tuple[dict, list[Rule]]] = {
    "modelopt NVFP4 experts": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, [(is_expert, nvfp4_modelopt)]),
    "modelopt NVFP4 all linears": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, [(is_linear, nvfp4_modelopt)]),
    "modelopt mixed": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        [(is_attention, fp8_tensor), (is_expert, nvfp4_modelopt),
         (lambda name: name == "lm_head.weight", nvfp4_modelopt)]),
    "compressed-tensors NVFP4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        [(is_linear, nvfp4_compressed_tensors)]),
    "compressed-tensors mixed": (
        {"quant_method": "compressed-tensors", "format": "mixed-precision"},
        [(is_attention, fp8_channel), (is_expert, nvfp4_compressed_tensors)]),
    "FP8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 12]}, [(is_linear, fp8_block)]),
}  # fmt: skip


def pack_base(base: Path, packed: Path, twin: Path, packing: str, seed: int = 0) -> None:
    """Write `packed`, a quantized sibling of `base`, and `twin`, what its bytes mean in float64.

    Both hold the same values; only the packed weights differ from `base`'s.
    """
    block, rules = PACKINGS[packing]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(base.glob("*.safetensors")):
        tensors |= load_file(shard)
    stored: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        pack = next((pack for fits, pack in rules if fits(name)), None)
        if pack is None or tensor.dim() != 2:
            stored[name], meaning[name] = tensor, tensor.double()
            continue
        parts, values = pack((tensor.shape[0], tensor.shape[1]), generator)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        meaning[name] = values
    config = json.loads((base / "config.json").read_text())
    for folder, content, extra in (
        (packed, stored, {"quantization_config": block}),
        (twin, meaning, {}),
    ):
        folder.mkdir(parents=True)
        save_file(content, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | extra))
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
