"""Small random bases that transformers itself built and saved."""

from pathlib import Path

import torch


def save_random_base(folder: Path, *, vocab_size: int = 64, layer_types=None, seed=0, **fields):
    """A random Qwen3.5-MoE text base, saved by transformers, in BF16."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    layer_types = layer_types or ["linear_attention", "full_attention"]
    config = Qwen3_5MoeTextConfig(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=len(layer_types),
        layer_types=layer_types, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, max_position_embeddings=256,
        initializer_range=0.2, eos_token_id=None, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                         "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        **fields,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(config)
    # Norm weights away from zero, so that a dropped or doubled norm is seen.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def save_random_dense_base(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A random dense Qwen3.5 text base, saved by transformers, in BF16."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=48,
        layer_types=["linear_attention", "full_attention"], num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, max_position_embeddings=256,
        initializer_range=0.2, eos_token_id=None, bos_token_id=None, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                         "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
