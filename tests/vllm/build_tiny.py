"""A tiny random base with a 4-layer MTP head whose drafts are sometimes right.

Random weights would never have a draft accepted. Here `lm_head` reads token t's embedding as
"next is follower[t]", and both trunk and head carry the embedding through on the residual stream,
disturbed by random attention and experts. So base and drafts mostly agree, break off at every
length, and each draft depends on the caches of the layer that made it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, VOCABULARY, NUM_MTP_LAYERS = 128, 256, 4
# What makes drafts break off at every length.
TINY_NOISE = {"trunk_noise": 4.0, "head_noise": 3.0}
FULL = ("full_attention",) * 2
HYBRID = ("linear_attention",) * 3 + ("full_attention",)


def text_config(
    num_mtp_layers: int = NUM_MTP_LAYERS,
    layer_types: tuple[str, ...] = FULL,
    mrope: bool = False,
    dtype: str = "float32",
) -> dict:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    if mrope:
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "rope_parameters": rope,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": num_mtp_layers,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": dtype,
    }


def build(
    folder: Path,
    *,
    num_mtp_layers: int = NUM_MTP_LAYERS,
    trunk_noise: float = 1.0,
    head_noise: float = 1.0,
    seed: int = 0,
    nan_layers: tuple[int, ...] = (),
    layer_types: tuple[str, ...] = FULL,
    mrope: bool = False,
    dtype: str = "float32",
) -> Path:
    """Write a checkpoint with head; `nan_layers` are filled with NaN. Returns `folder`."""
    import json

    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(seed)
    settings = text_config(num_mtp_layers, layer_types, mrope, dtype)
    config = Qwen3_5MoeTextConfig(**{k: v for k, v in settings.items() if k != "architectures"})
    base = Qwen3_5MoeForCausalLM(config).float()
    embedding = torch.randn(VOCABULARY, HIDDEN)
    follower = torch.randperm(VOCABULARY)
    state = {name: _random(name, tensor) for name, tensor in base.state_dict().items()}
    state["model.embed_tokens.weight"] = embedding
    state["lm_head.weight"] = torch.empty_like(embedding).index_copy_(0, follower, embedding)
    _scale(state, trunk_noise)
    head = {}
    attending = f"model.layers.{layer_types.index('full_attention')}."
    for k in range(num_mtp_layers):
        for name, tensor in base.state_dict().items():
            if name.startswith(attending):
                renamed = name.replace(attending, f"mtp.layers.{k}.")
                head[renamed] = _random(name, tensor)
                if k in nan_layers:
                    head[renamed] = torch.full_like(tensor, float("nan"))
    _scale(head, head_noise)
    eye = torch.eye(HIDDEN)
    head["mtp.fc.weight"] = torch.cat([eye, 0.3 * eye], dim=1) + 0.02 * torch.randn(
        HIDDEN, 2 * HIDDEN
    )
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[f"mtp.{norm}.weight"] = 0.1 * torch.randn(HIDDEN)
    folder.mkdir(parents=True, exist_ok=True)
    stored = getattr(torch, dtype)
    tensors = {n: t.to(stored).contiguous() for n, t in (state | head).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    saved = config.to_dict() | settings
    (folder / "config.json").write_text(json.dumps(saved, indent=2))
    return folder


def _random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if "linear_attn.norm" in name:
        return 1 + 0.1 * torch.randn(tensor.shape)  # this norm multiplies by w, not 1 + w
    if "norm" in name:
        return 0.1 * torch.randn(tensor.shape)
    return torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5


def _scale(state: dict[str, torch.Tensor], noise: float) -> None:
    """Scale what each block adds to the residual stream."""
    for name, tensor in state.items():
        if "o_proj" in name or "out_proj" in name or "down_proj" in name:
            state[name] = tensor * noise
        elif ".q_proj" in name or ".k_proj" in name:
            state[name] = tensor * 2


if __name__ == "__main__":
    import sys

    print(build(Path(sys.argv[1])))
