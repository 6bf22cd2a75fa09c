"""vLLM's own reading of a draft's folder: its config, its class, its loader, its heads.

Only the GPU runner drafts with DSpark ("Model Runner V1 does not support: dspark speculative
decoding", on a CPU too), so nothing is served here: the configuration is vLLM's conversion of
config.json, the modules are built and filled by vLLM, and what needs no KV cache runs. vLLM 0.33's
qwen3_dspark.py and speculators/algos.py are those of 0.32 to the byte.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from dspark_tiny import random_draft
from random_bases import save_random_base
from safetensors.torch import load_file

from graft.reader import Checkpoint
from mtp.dspark.config import config_for_base
from mtp.dspark.export import WEIGHTS, load_draft, save_draft
from mtp.dspark.recipe import DSparkRecipe
from mtp.dspark.vocabulary import DraftVocabulary

KEPT = torch.tensor([0, 1, 2, 4, 5, 7, 9, 11, 12, 15])
RECIPE = DSparkRecipe(
    block_size=4, num_speculative_tokens=3, draft_vocab_size=10, aux_layers=(1, 2), markov_rank=4,
    num_layers=2, sliding_window=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dspark") / "base"
    return save_random_base(folder, vocab_size=16, layer_types=["full_attention"] * 2)


@pytest.fixture(scope="module")
def draft(base: Path) -> Path:
    folder, checkpoint = base.parent / "draft", Checkpoint(base)
    folder.mkdir()
    config = config_for_base(checkpoint.text_config, RECIPE, 15)
    save_draft(
        folder, config, random_draft(config).state_dict(),
        DraftVocabulary(kept=KEPT, vocab_size=16), base=checkpoint, fingerprint={},
        provenance={}, acceptance=None,
    )  # fmt: skip
    return folder


def converted(draft: Path) -> Any:
    from vllm.transformers_utils.config import get_config

    return get_config(str(draft), trust_remote_code=False)


def test_vllm_reads_the_config_as_it_is_meant(draft: Path) -> None:
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    config = converted(draft)
    assert config.architectures == ["Qwen3DSparkModel"]
    assert config.target_layer_ids == [0, 1]  # one less than the finished layers
    assert config.eagle_aux_hidden_state_layer_ids == [1, 2]
    assert config.sample_from_anchor is True and config.dspark_bonus_anchor is False
    assert (config.draft_vocab_size, config.vocab_size) == (10, 16)
    assert (config.block_size, config.markov_rank, config.mask_token_id) == (4, 4, 15)
    assert config.layer_types == ["sliding_attention"] * 2 and config.sliding_window == 16
    assert config.rope_parameters["partial_rotary_factor"] == 1.0
    values, _ = SpeculatorsConfig.get_config_dict(str(draft))
    speculative = SpeculatorsConfig.extract_vllm_speculative_config(values)
    assert speculative == {"method": "dspark", "num_speculative_tokens": 4}
    del values["sample_from_anchor"]  # what vLLM would do if it were not written
    again = SpeculatorsConfig.extract_transformers_pre_trained_config(values)
    assert again["dspark_bonus_anchor"] is True


@pytest.fixture(scope="module")
def loaded(base: Path, draft: Path) -> Any:
    """vLLM's Qwen3DSparkForCausalLM, filled by its own load_weights, in float32."""
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
    config = EngineArgs(
        model=str(base), skip_tokenizer_init=True, enforce_eager=True, **options
    ).create_engine_config()
    speculative = SpeculativeConfig(
        model=str(draft), method="dspark", num_speculative_tokens=3,
        target_model_config=config.model_config, target_parallel_config=config.parallel_config,
    )  # fmt: skip
    # Set behind the check that refuses the method on a CPU.
    object.__setattr__(config, "speculative_config", speculative)
    with set_current_vllm_config(config, check_compile=False):
        store = base.parent / "store"
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.float32)
        model = Qwen3DSparkForCausalLM(vllm_config=config)
        model.load_weights(iter(load_file(draft / WEIGHTS).items()))
        yield model
    cleanup_dist_env_and_memory()


def test_every_tensor_arrives(loaded: Any, draft: Path) -> None:
    stored, seen = load_file(draft / WEIGHTS), dict(loaded.named_parameters())
    assert torch.equal(loaded.draft_id_to_target_id, stored.pop("d2t"))
    stored.pop("t2d")
    parts = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}
    fused = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    fused |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
    for name, tensor in stored.items():
        module = name.split(".")[-2]
        target = name if name.startswith("lm_head") else f"model.{name}"
        found = seen[target.replace(module, fused.get(module, module))]
        if module in fused:
            sizes = [len(stored[name.replace(module, other)]) for other in parts
                     if fused[other] == fused[module]]  # fmt: skip
            found = found.split(sizes)[parts[module]]
        assert torch.equal(found[: len(tensor)].float(), tensor.float()), name


def test_heads_and_context_say_the_same(loaded: Any, draft: Path) -> None:
    ours, vocabulary = load_draft(draft)
    for module in loaded.modules():  # a CPU repacks its weights, so this comes last for them
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 32, generator=generator)
    previous = torch.tensor([0, 15, 3, 7, 9])
    with torch.no_grad():
        embedded = loaded.markov_embed(previous)
        logits = loaded.compute_draft_logits(hidden) + loaded.markov_bias(embedded)
        torch.testing.assert_close(logits, ours.logits(hidden, previous), rtol=1e-5, atol=1e-5)
        chances = loaded.compute_confidence(hidden, embedded)
        torch.testing.assert_close(
            chances, ours.confidence(hidden, previous).sigmoid(), rtol=1e-5, atol=1e-5
        )
        aux = torch.randn(5, 64, generator=generator)
        torch.testing.assert_close(
            loaded.combine_hidden_states(aux), ours.fc(aux), rtol=1e-5, atol=1e-5
        )
    drafted = torch.arange(10)
    assert torch.equal(loaded.map_draft_to_target(drafted), vocabulary.kept)


def test_layers_are_causal_windows(loaded: Any) -> None:
    assert loaded.get_draft_attn_causal() == [True, True]
    for layer in loaded.model.layers:
        assert layer.self_attn.sliding_window == 16
        assert layer.self_attn.rotary_emb.rotary_dim == layer.self_attn.head_dim


@pytest.mark.parametrize("missing", ["lm_head.weight", "d2t"])
def test_negative_control_vllm_refuses_a_reduced_vocabulary_without(
    loaded: Any, draft: Path, missing: str
) -> None:
    tensors = load_file(draft / WEIGHTS)
    del tensors[missing]
    with pytest.raises(ValueError, match=missing.split(".")[0]):
        loaded.load_weights(iter(tensors.items()))
