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


def text_config(num_mtp_layers: int = NUM_MTP_LAYERS) -> dict:
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": num_mtp_layers,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "float32",
    }


def build(
    folder: Path,
    *,
    num_mtp_layers: int = NUM_MTP_LAYERS,
    trunk_noise: float = 1.0,
    head_noise: float = 1.0,
    seed: int = 0,
    nan_layers: tuple[int, ...] = (),
) -> Path:
    """Write a checkpoint with head; `nan_layers` are filled with NaN. Returns `folder`."""
    import json

    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(seed)
    settings = text_config(num_mtp_layers)
    config = Qwen3_5MoeTextConfig(**{k: v for k, v in settings.items() if k != "architectures"})
    base = Qwen3_5MoeForCausalLM(config).float()
    embedding = torch.randn(VOCABULARY, HIDDEN)
    follower = torch.randperm(VOCABULARY)
    state = {name: _random(name, tensor) for name, tensor in base.state_dict().items()}
    state["model.embed_tokens.weight"] = embedding
    state["lm_head.weight"] = torch.empty_like(embedding).index_copy_(0, follower, embedding)
    _scale(state, trunk_noise)
    head = {}
    for k in range(num_mtp_layers):
        for name, tensor in base.state_dict().items():
            if name.startswith("model.layers.0."):
                renamed = name.replace("model.layers.0.", f"mtp.layers.{k}.")
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
    tensors = {n: t.contiguous() for n, t in (state | head).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    saved = config.to_dict() | settings
    (folder / "config.json").write_text(json.dumps(saved, indent=2))
    return folder


def _random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if "norm" in name:
        return 0.1 * torch.randn(tensor.shape)
    return torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5


def _scale(state: dict[str, torch.Tensor], noise: float) -> None:
    """Scale what each block adds to the residual stream."""
    for name, tensor in state.items():
        if "o_proj" in name or "down_proj" in name:
            state[name] = tensor * noise
        elif ".q_proj" in name or ".k_proj" in name:
            state[name] = tensor * 2


if __name__ == "__main__":
    import sys

    print(build(Path(sys.argv[1])))
