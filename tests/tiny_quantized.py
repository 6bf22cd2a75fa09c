"""Tiny trunks as each quantizer leaves them: tensors, config.json's block, hf_quant_config.json.

The values are random: what matters are names, dtypes, shapes and what the configs say of them.
"""

from __future__ import annotations

import re
from typing import Any

import torch

NVFP4_ARGUMENTS = {"num_bits": 4, "type": "float", "group_size": 16}
CT_WEIGHTS = NVFP4_ARGUMENTS | {
    "strategy": "tensor_group", "symmetric": True, "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
EXPERTS, ATTENTION = r"\.mlp\.experts\.\d+\.", r"\.self_attn\.[qkvo]_proj"
SHARED, LM_HEAD = r"\.mlp\.shared_expert\.", r"^lm_head"

# A row: which modules are quantized (pattern -> layout), and the two config blocks for them.
QUANTIZED: dict[str, dict[str, Any]] = {
    "modelopt NVFP4": {"stored": {EXPERTS: "nvfp4"}, "algo": "NVFP4"},
    "modelopt NVFP4, config.json alone": {
        "stored": {EXPERTS: "nvfp4", SHARED: "nvfp4"}, "algo": "NVFP4", "file": False},
    "modelopt NVFP4, hf_quant_config.json alone": {
        "stored": {EXPERTS: "nvfp4"}, "algo": "NVFP4", "block": False},
    "modelopt NVFP4, no input activations": {
        "stored": {EXPERTS: "nvfp4-w4a16"}, "algo": "NVFP4", "plain": True},
    "modelopt W4A16_NVFP4": {
        "stored": {EXPERTS: "nvfp4-w4a16"}, "algo": "W4A16_NVFP4", "plain": True},
    "modelopt MIXED_PRECISION": {
        "stored": {EXPERTS: "nvfp4-w4a16", LM_HEAD: "nvfp4-w4a16", ATTENTION: "fp8"},
        "algo": "MIXED_PRECISION"},
    "modelopt MIXED_PRECISION, layers in hf_quant_config.json": {
        "stored": {EXPERTS: "nvfp4", ATTENTION: "fp8"}, "algo": "MIXED_PRECISION",
        "layers_in_block": False},
    "compressed-tensors W4A4": {"stored": {EXPERTS: "ct", SHARED: "ct", ATTENTION: "ct"}},
    "compressed-tensors W4A16": {"stored": {EXPERTS: "ct-w4a16", SHARED: "ct-w4a16"}},
    "FP8 block": {"stored": {EXPERTS: "fp8-block", SHARED: "fp8-block", ATTENTION: "fp8-block"}},
}  # fmt: skip


def quantize_trunk(
    tensors: dict[str, torch.Tensor], row: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None, dict[str, Any] | None]:
    """A trunk with the modules of a row quantized, and its two config blocks."""
    quantized: dict[str, torch.Tensor] = {}
    stored: dict[str, str] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        layout = next((kind for p, kind in row["stored"].items() if re.search(p, module)), None)
        if layout is None:
            quantized[name] = tensor
        else:
            stored[module] = layout
            quantized |= quantize_matrix(module, tensor, layout)
    plain = [
        name.removesuffix(".weight")
        for name, tensor in quantized.items()
        if tensor.dtype == torch.bfloat16 and tensor.dim() > 1 and "embed_tokens" not in name
    ]
    return quantized, *config_blocks(row, stored, plain)


def quantize_matrix(module: str, tensor: torch.Tensor, layout: str) -> dict[str, torch.Tensor]:
    """One matrix [out, in] in a layout, with plausible random values."""
    rows, columns = tensor.shape
    if layout == "fp8-block":
        blocks = (-(-rows // 128), -(-columns // 128))
        return {f"{module}.weight": tensor.to(torch.float8_e4m3fn),
                f"{module}.weight_scale_inv": torch.rand(blocks) + 0.5}  # fmt: skip
    if layout == "fp8":
        return {f"{module}.weight": tensor.to(torch.float8_e4m3fn),
                f"{module}.weight_scale": torch.tensor(0.25),
                f"{module}.input_scale": torch.tensor(0.5)}  # fmt: skip
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scale = (torch.rand(rows, columns // 16) * 3 + 0.5).to(torch.float8_e4m3fn)
    if layout.startswith("nvfp4"):
        parts = {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(1e-3),
                 "input_scale": torch.tensor(2e-3)}  # fmt: skip
    else:
        parts = {"weight_packed": codes, "weight_scale": scale,
                 "weight_global_scale": torch.tensor([1e3]),
                 "input_global_scale": torch.tensor([5e2])}  # fmt: skip
    if layout.endswith("w4a16"):
        parts = {name: part for name, part in parts.items() if not name.startswith("input")}
    return {f"{module}.{name}": part for name, part in parts.items()}


def config_blocks(
    row: dict[str, Any], stored: dict[str, str], plain: list[str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """`quantization_config`, and the contents of hf_quant_config.json."""
    layouts = set(row["stored"].values())
    if "fp8-block" in layouts:
        block = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                 "weight_block_size": [128, 128],
                 "modules_to_not_convert": [*plain, "mtp.fc"]}  # fmt: skip
        return block, None
    if layouts & {"ct", "ct-w4a16"}:
        inputs = None if "ct-w4a16" in layouts else CT_WEIGHTS | {"dynamic": "local"}
        group = {"targets": ["Linear"], "weights": CT_WEIGHTS, "input_activations": inputs}
        ignore = [*plain, "re:^mtp.*"]
        block = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                 "quantization_status": "compressed", "config_groups": {"group_0": group},
                 "ignore": ignore}  # fmt: skip
        return block, None
    ignore = [*plain, "mtp*"]
    numbers = NVFP4_ARGUMENTS | {"dynamic": False}
    group = {"targets": ["Linear"], "weights": numbers,
             "input_activations": None if row.get("plain") else numbers}  # fmt: skip
    algo, producer = row["algo"], {"name": "modelopt", "version": "0.47.0"}
    block = {"quant_method": "modelopt", "quant_algo": algo, "producer": producer,
             "config_groups": {"group_0": group}, "ignore": ignore}  # fmt: skip
    inner = {"quant_algo": algo, "kv_cache_quant_algo": None, "group_size": 16,
             "exclude_modules": ignore}  # fmt: skip
    if algo == "MIXED_PRECISION":
        names = {"nvfp4": "NVFP4", "nvfp4-w4a16": "W4A16_NVFP4", "fp8": "FP8"}
        layers = {
            module: {"quant_algo": names[kind]} | ({} if kind == "fp8" else {"group_size": 16})
            for module, kind in stored.items()
        }
        del block["config_groups"]
        inner["quantized_layers"] = layers
        if row.get("layers_in_block", True):
            block["quantized_layers"] = layers
    file = {"producer": producer, "quantization": inner}
    return block if row.get("block", True) else None, file if row.get("file", True) else None
