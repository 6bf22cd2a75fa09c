"""Tiny random bases and heads of every layout, written with torch and safetensors alone.

Hidden 32, vocabulary 64, 4 layers (3 linear, 1 full), 2 heads, 1 KV head, head_dim 16, 4 experts
top-2, expert width 16: small enough for hypothesis, and divisible as NVFP4 needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_quantized import QUANTIZED, quantize_trunk

from graft.formats import Form, head_tensors
from graft.layout import head_tensor_shapes, split_experts
from graft.manifest import base_fingerprint, head_metadata, write_head
from graft.reader import Checkpoint

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "attn_output_gate": True,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
DENSE = {"num_experts": None, "model_type": "qwen3_5_text", "intermediate_size": 48}
# What a flat Qwen3-Next config has otherwise: no key for the number of MTP layers means one.
NEXT = {"model_type": "qwen3_next", "decoder_sparse_step": 1, "mlp_only_layers": [],
        "intermediate_size": 48}  # fmt: skip

# A row: keyword arguments of `write_base`.
BASES: dict[str, dict[str, Any]] = {
    "nested multimodal, per-expert": {},
    "nested multimodal, fused": {"experts": "fused"},
    "flat, prefixed": {"nested": False},
    "flat, clean": {"nested": False, "prefix": "model."},
    "single file, no index": {"num_shards": 1, "nested": False, "prefix": "model."},
    "several files, no index": {"index": False},
    "odd shard names": {"shard_name": "weights-{:d}x.safetensors"},
    "tied": {"tied": True, "nested": False, "prefix": "model."},
    "dense": {"dense": True},
    "dense, tied": {"dense": True, "tied": True},
    "dense, flat": {"dense": True, "nested": False, "prefix": "model."},
    "Qwen3-Next, no head": {"family": "next"},
    "Qwen3-Next, one-layer head": {
        "family": "next", "head_layers": 1, "head_form": "bf16-per-expert", "head_place": "shard"},
    "Qwen3-Next, one-layer head among trunk tensors": {
        "family": "next", "declared": 1, "head_layers": 1, "head_place": "mixed"},
    "Qwen3-Next, some layers dense": {
        "family": "next", "text": {"mlp_only_layers": [1], "decoder_sparse_step": 1}},
    "declared but absent head": {"declared": 1},
    "four layers declared, none there": {"declared": 4},
    "one-layer head in its own shard": {"declared": 1, "head_layers": 1, "head_place": "shard"},
    "one-layer head among trunk tensors": {
        "declared": 1, "head_layers": 1, "head_place": "mixed"},
    "one-layer head beside the index": {
        "declared": 1, "head_layers": 1, "head_place": "standalone"},
    "one-layer head in a single file": {
        "declared": 1, "head_layers": 1, "head_place": "mixed", "num_shards": 1},
    "one-layer head, text-only": {
        "declared": 1, "head_layers": 1, "nested": False, "prefix": "model.",
        "experts": "fused"},
    "layer types that count the head": {
        "declared": 1, "head_layers": 1,
        "text": {"layer_types": [*TEXT_CONFIG["layer_types"], "full_attention"]}},
    "four-layer per-expert head": {
        "declared": 4, "head_layers": 4, "head_form": "bf16-per-expert", "head_place": "shard"},
}  # fmt: skip


def write_base(
    folder: Path,
    *,
    nested: bool = True,
    prefix: str = "model.language_model.",
    experts: str = "per_expert",
    dense: bool = False,
    family: str = "3.5",
    text: dict[str, Any] | None = None,
    tied: bool = False,
    declared: int | None = None,
    head_layers: int = 0,
    head_form: Form = "bf16-fused",
    head_place: str = "shard",
    num_shards: int = 3,
    shard_name: str | None = None,
    index: bool = True,
    quantized: str | None = None,
    seed: int = 0,
) -> Path:
    """Write a tiny base of one layout and return its folder.

    `text` overrides text config keys, `quantized` is a row of `QUANTIZED`.
    """
    folder.mkdir(parents=True)
    is_next = family == "next"
    if is_next:
        nested, prefix = False, "model."
    text = (
        TEXT_CONFIG | (DENSE if dense else {}) | (NEXT if is_next else {})
        | {"tie_word_embeddings": tied} | (text or {})
    )  # fmt: skip
    if declared is not None:
        text["num_nextn_predict_layers" if is_next else "mtp_num_hidden_layers"] = declared
    kind = "Qwen3Next" if is_next else "Qwen3_5" if dense else "Qwen3_5Moe"
    config = {"architectures": [f"{kind}ForCausalLM"], **text}
    if nested:
        config = {
            "architectures": [f"{kind}ForConditionalGeneration"],
            "model_type": text["model_type"].removesuffix("_text"),
            "tie_word_embeddings": tied, "text_config": text, "vision_config": {"depth": 1},
        }  # fmt: skip
    trunk = trunk_tensors(text, prefix, experts=experts, vision=nested, seed=seed)
    if quantized is not None:
        trunk, block, file = quantize_trunk(trunk, QUANTIZED[quantized])
        if block is not None:
            config["quantization_config"] = block
        if file is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(file, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "README.md").write_text("# a tiny base\n")
    head = random_head(text, head_layers, head_form, seed=seed + 1) if head_layers else {}
    groups = [dict(list(trunk.items())[i::num_shards]) for i in range(num_shards)]
    if head and head_place == "mixed":
        groups[-1] |= head
    elif head and head_place == "shard":
        groups.append(head)
    single = len(groups) == 1 and shard_name is None
    shard_name = shard_name or "model-{:05d}-of-" + f"{len(groups):05d}.safetensors"
    weight_map, total = {}, 0
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if single else shard_name.format(number)
        save_file(group, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, name)
        total += sum(t.numel() * t.element_size() for t in group.values())
    if index and not single:
        value = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(value, indent=2))
    if head and head_place == "standalone":
        save_file(head, folder / "mtp.safetensors", metadata={"format": "pt"})
    return folder


def trunk_tensors(
    text: dict[str, Any], prefix: str, *, experts: str, vision: bool, seed: int
) -> dict[str, torch.Tensor]:
    """Random trunk tensors with the names and shapes that transformers writes."""
    hidden, keys, values = 32, 2 * 16, 4 * 16
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (64, hidden)}
    # A decoder layer of the head is one of the trunk: same names behind another prefix.
    num_layers = text["num_hidden_layers"]
    like_a_head = head_tensor_shapes(text, num_layers, experts)  # type: ignore[arg-type]
    for layer, kind in enumerate(text["layer_types"][:num_layers]):
        here = {
            name.removeprefix(f"mtp.layers.{layer}."): shape
            for name, shape in like_a_head.items()
            if name.startswith(f"mtp.layers.{layer}.")
            and (kind == "full_attention" or "self_attn" not in name)
        }
        if kind == "linear_attention":
            here |= {
                "linear_attn.A_log": (4,), "linear_attn.dt_bias": (4,),
                "linear_attn.conv1d.weight": (2 * keys + values, 1, 4),
                "linear_attn.norm.weight": (16,), "linear_attn.out_proj.weight": (hidden, values),
            }  # fmt: skip
            if text["model_type"] == "qwen3_next":
                here |= {
                    "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
                    "linear_attn.in_proj_ba.weight": (2 * 4, hidden),
                }
            else:
                here |= {
                    "linear_attn.in_proj_qkv.weight": (2 * keys + values, hidden),
                    "linear_attn.in_proj_z.weight": (values, hidden),
                    "linear_attn.in_proj_a.weight": (4, hidden),
                    "linear_attn.in_proj_b.weight": (4, hidden),
                }
        shapes |= {f"{prefix}layers.{layer}.{name}": shape for name, shape in here.items()}
    shapes[f"{prefix}norm.weight"] = (hidden,)
    if not text["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (64, hidden)
    if vision:
        shapes["model.visual.blocks.0.attn.qkv.weight"] = (48, 16)
        shapes["model.visual.blocks.0.attn.proj.weight"] = (16, 16)
        shapes["model.visual.patch_embed.proj.weight"] = (16, 3, 2, 4, 4)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def random_head(
    text: dict[str, Any], num_layers: int, form: Form, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Random, valid head tensors of any form."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in head_tensors(text, num_layers, form).items():
        if dtype == "U8":
            tensors[name] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        elif dtype == "F8_E4M3":
            scale = torch.rand(shape, generator=generator) * 3 + 0.5
            tensors[name] = scale.to(torch.float8_e4m3fn)
        elif dtype == "F32":
            tensors[name] = torch.rand(shape, generator=generator) * 0.01 + 1e-3
        else:
            tensors[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    for name, tensor in tensors.items():
        if name.endswith("global_scale"):
            tensors[name] = 1 / tensor
    for name in tensors:
        if name.endswith(("up_proj.weight_scale_2", "up_proj.weight_global_scale")):
            tensors[name] = tensors[name.replace("up_proj", "gate_proj")].clone()
    return tensors


def write_tiny_head(
    folder: Path,
    base: Path,
    *,
    num_layers: int = 4,
    form: Form = "bf16-fused",
    seed: int = 1,
    tensors: dict[str, torch.Tensor] | None = None,
    **metadata: Any,
) -> Path:
    """Write a head folder that belongs to `base`; `tensors` and `metadata` override."""
    checkpoint = Checkpoint(base)
    if tensors is None:
        tensors = random_head(checkpoint.text_config, num_layers, form, seed)
    folder.mkdir(parents=True)
    values: dict[str, Any] = {
        "num_layers": num_layers, "form": form, "text_config": checkpoint.text_config,
        "base_fingerprint": base_fingerprint(checkpoint), "provenance": {"seed": seed},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16} if "nvfp4" in form else None,
    }  # fmt: skip
    write_head(folder, tensors, head_metadata(**(values | metadata)))
    return folder


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused tensors as `bf16-per-expert` holds them, contiguous."""
    return {name: tensor.contiguous() for name, tensor in split_experts(tensors).items()}
