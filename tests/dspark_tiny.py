"""DSpark drafts small enough for slow references."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from graft.manifest import base_fingerprint
from graft.reader import Checkpoint
from mtp.dspark.config import DSparkConfig, config_for_base
from mtp.dspark.export import save_draft
from mtp.dspark.model import DSparkModel
from mtp.dspark.recipe import DSparkRecipe
from mtp.dspark.vocabulary import DraftVocabulary

TINY = DSparkConfig(
    vocab_size=24, draft_vocab_size=12, hidden_size=16, intermediate_size=20,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
    initializer_range=0.2, max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    layer_types=("sliding_attention", "full_attention", "sliding_attention"), sliding_window=40,
    block_size=4, aux_layers=(1, 2), mask_token_id=23, markov_rank=6,
)  # fmt: skip


def tiny_config(**fields: Any) -> DSparkConfig:
    return dataclasses.replace(TINY, **fields)


def random_draft(config: DSparkConfig = TINY, seed: int = 0) -> DSparkModel:
    """Random weights everywhere, norms away from one."""
    torch.manual_seed(seed)
    model = DSparkModel(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model.eval()


def random_inputs(
    config: DSparkConfig, num_rows: int, num_tokens: int, anchors: torch.Tensor, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [R, T], aux [R, T, A * H], the base's embedding [V, H], block inputs [R, N, B]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size - 1, (num_rows, num_tokens), generator=generator)
    size = len(config.aux_layers) * config.hidden_size
    aux = torch.randn(num_rows, num_tokens, size, generator=generator)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    blocks = torch.full((*anchors.shape, config.block_size), config.mask_token_id)
    blocks[..., 0] = ids.gather(1, anchors)
    return ids, aux, embedding, blocks


def write_draft(folder: Path, base: Path) -> Path:
    """A folder of a random draft for a base of 16 words (`training.write_training_base`)."""
    checkpoint = Checkpoint(base)
    recipe = DSparkRecipe(
        block_size=4, num_speculative_tokens=3, draft_vocab_size=10, aux_layers=(1, 2),
        markov_rank=4, num_layers=1,
    )  # fmt: skip
    config = config_for_base(checkpoint.text_config, recipe, 15)
    folder.mkdir()
    save_draft(
        folder, config, random_draft(config).state_dict(),
        DraftVocabulary(kept=torch.arange(3, 13), vocab_size=16), base=checkpoint,
        fingerprint=base_fingerprint(checkpoint), provenance={"tokens": 77, "licences": ["MIT"]},
        acceptance=None,
    )  # fmt: skip
    return folder
