"""A small multimodal base that transformers itself built, for text-only grafts."""

from __future__ import annotations

import torch


def save_vision_base(folder, dense=False):
    """A random multimodal base, saved by transformers in two shards, so that one is mixed."""
    import transformers

    kind = "Qwen3_5" if dense else "Qwen3_5Moe"
    text = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "max_position_embeddings": 256, "mtp_num_hidden_layers": 1, "eos_token_id": 3,
        "bos_token_id": 3, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    text |= {"intermediate_size": 48} if dense else {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, image_token_id=60, video_token_id=61, vision_start_token_id=58,
        vision_end_token_id=59, vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16},
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40KB")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
