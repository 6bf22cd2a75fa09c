"""A text-only graft is vLLM's text class: what a real vLLM resolves from its config."""

from __future__ import annotations

import pytest
from tiny import write_tiny_head
from vision_base import save_vision_base

from graft.plan import plan_graft
from graft.writer import write_graft


@pytest.mark.parametrize("dense", [False, True])
def test_vllm_builds_the_text_class_and_its_head(tmp_path, dense):
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    def resolve(folder):
        target = ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=64)
        draft = SpeculativeConfig(
            method="mtp", num_speculative_tokens=4, target_model_config=target,
            target_parallel_config=ParallelConfig(),
        )  # fmt: skip
        head = draft.draft_model_config
        return target.architecture, target.is_multimodal_model, head.architecture, head.hf_config

    base = save_vision_base(tmp_path / "base", dense)
    head = write_tiny_head(tmp_path / "head", base)
    full = write_graft(plan_graft(base, head), tmp_path / "full").out
    text = write_graft(plan_graft(base, head, text_only=True), tmp_path / "text").out
    kind, draft = ("Qwen3_5", "Qwen3_5MTP") if dense else ("Qwen3_5Moe", "Qwen3_5MoeMTP")
    *found, config = resolve(text)
    assert found == [f"{kind}ForCausalLM", False, draft] and config.n_predict == 4
    *found, config = resolve(full)
    assert found == [f"{kind}ForConditionalGeneration", True, draft] and config.n_predict == 4
