"""What transformers does to heads, and that the tools here neither rely on it nor fall for it."""

from __future__ import annotations

import json

import pytest
import torch
from random_bases import save_random_base
from safetensors.torch import load_file, save_file
from tiny import random_head, write_tiny_head

from graft.inspect import inspect_checkpoint
from graft.layout import count_key
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.verify import verify_graft
from graft.writer import write_graft


def save_next_base(folder):
    """A random Qwen3-Next base, saved by transformers: flat config, fused linear attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        layer_types=["linear_attention", "full_attention"], num_key_value_heads=1, head_dim=32,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=48,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, max_position_embeddings=256,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("save", [save_random_base, save_next_base])
def test_bugs_A1_and_A5_transformers_drops_heads_and_says_nothing(tmp_path, save):
    from transformers import AutoModelForCausalLM

    base = save(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {count_key(config): 1}))
    head = random_head(config, 1, "bf16-fused")
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | head, base / "model.safetensors", metadata={"format": "pt"})
    assert inspect_checkpoint(base).servable and len(Checkpoint(base).head_names) == len(head)

    model, loading = AutoModelForCausalLM.from_pretrained(base, output_loading_info=True)
    assert not loading["unexpected_keys"]  # filtered by its own pattern: not a source to trust
    model.save_pretrained(tmp_path / "saved")
    saved = Checkpoint(tmp_path / "saved")
    assert not saved.head_names and saved.config[count_key(config)] == 1
    (problem,) = inspect_checkpoint(tmp_path / "saved").problems
    assert problem.what == "declared 1 MTP layers, found none; mtp graft adds a head"
    assert any("found none" in failure for failure in verify_graft(tmp_path / "saved").failures)

    folder = write_tiny_head(tmp_path / "head", tmp_path / "saved", num_layers=1)  # bug A2
    out = write_graft(plan_graft(tmp_path / "saved", folder), tmp_path / "out").out
    assert verify_graft(out, tmp_path / "saved").ok and inspect_checkpoint(out).servable
