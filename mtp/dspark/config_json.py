"""The config.json of a DSpark draft: what `speculators` and vLLM read, written and read back.

A folder comes from anywhere, so all that is read is checked here, once: a wrong number is an error
that names its key, not a traceback from inside torch. Sources: speculators 0.9.0, `models/dspark`;
vLLM 0.33, `transformers_utils/configs/speculators/algos.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from graft.errors import UserError
from mtp.dspark.config import FULL, SLIDING, DSparkConfig

SPECULATORS_VERSION = "0.9.0"  # whose schema is written
# Drafts of other kinds, which are not trained here; what is absent is taken to be as here.
FIXED = {
    "sample_from_anchor": True, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "sliding_window_non_causal": False,
}  # fmt: skip
FIXED_IN_LAYERS = {"hidden_act": "silu", "attention_bias": False}
COUNTS = ("draft_vocab_size", "block_size", "mask_token_id", "markov_rank")
LAYER_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "sliding_window",
)  # fmt: skip


def to_json(
    config: DSparkConfig, *, verifier: str, verifier_architectures: list[str]
) -> dict[str, Any]:
    """config.json of the draft.

    Args:
        config: the shape.
        verifier: the base's folder or Hub name. Only a Hub name lets vLLM serve the draft's folder
            by itself; a local base is named on the command line.
        verifier_architectures: from the base's config.json.
    """
    layers = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layer_types),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps, "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": config.rope_parameters, "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": SLIDING in config.layer_types, "tie_word_embeddings": False,
    }  # fmt: skip
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": config.block_size,
        "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark",
        "speculators_version": SPECULATORS_VERSION, "dtype": "bfloat16",
        "tie_word_embeddings": False, "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "draft_vocab_size": config.draft_vocab_size, "mask_token_id": config.mask_token_id,
        "sample_from_anchor": True, "sliding_window_non_causal": False,
        "target_hidden_size": None, "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "speculators_config": {
            "algorithm": "dspark", "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
        "transformer_layer_config": layers,
    }  # fmt: skip


def from_json(values: Mapping[str, Any], path: Path) -> DSparkConfig:
    """The shape that a config.json describes.

    Args:
        values: its contents.
        path: of the file, for the message.

    Raises:
        UserError: not a DSpark draft, one of a kind that is not trained here, or values that are
            missing, of another type, or do not fit together.
    """
    kind = values.get("speculators_model_type")
    if kind != "dspark":
        raise UserError(
            f"a DSpark draft's config.json at {path}", f"{kind!r}", "name a draft's folder"
        )
    try:
        layers = values["transformer_layer_config"]
        for part, fixed in ((values, FIXED), (layers, FIXED_IN_LAYERS)):
            for key, wanted in fixed.items():
                if part.get(key, wanted) != wanted:
                    raise UserError(
                        f"a draft with {key} {wanted}", f"{part[key]}", "train one here"
                    )
        config = DSparkConfig(
            **{key: _count(values, key) for key in COUNTS},
            **{key: _count(layers, key) for key in LAYER_COUNTS},
            rms_norm_eps=_number(layers, "rms_norm_eps"),
            initializer_range=_number(layers, "initializer_range"),
            rope_parameters=layers["rope_parameters"],
            layer_types=tuple(layers["layer_types"]),
            aux_layers=tuple(values["aux_hidden_state_layer_ids"]),
        )
        problem = _problem(config)
        # vLLM reads both.
        _count(values["speculators_config"]["proposal_methods"][0], "speculative_tokens")
        values["speculators_config"]["verifier"]["name_or_path"]
    except KeyError as error:
        problem = f"no {error.args[0]}"
    except ValueError as error:
        problem = str(error)
    except (AttributeError, IndexError, TypeError) as error:
        problem = f"values of another kind: {error}"
    if problem:
        raise UserError(
            f"the config.json of a whole DSpark draft at {path}",
            problem,
            "restore that file, or train the draft again",
        )
    return config


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if type(value) is not int or value < (key != "mask_token_id"):
        raise ValueError(f"{key} {value!r}")
    return value


def _number(values: Mapping[str, Any], key: str) -> float:
    value = values[key]
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"{key} {value!r}")
    return float(value)


def _problem(config: DSparkConfig) -> str:
    """What does not fit together; empty if all does."""
    layers, aux = config.layer_types, config.aux_layers
    rope = config.rope_parameters
    _number(rope, "rope_theta")
    numbered = all(type(layer) is int and layer > 0 for layer in aux)
    rules = {
        f"layer_types {list(layers)}": layers and set(layers) <= {FULL, SLIDING},
        f"aux_hidden_state_layer_ids {list(aux)}":
            aux and numbered and all(a < b for a, b in pairwise(aux)),
        f"draft_vocab_size {config.draft_vocab_size} of {config.vocab_size}":
            config.draft_vocab_size <= config.vocab_size,
        f"mask_token_id {config.mask_token_id} of {config.vocab_size}":
            config.mask_token_id < config.vocab_size,
        f"{config.num_attention_heads} heads in {config.num_key_value_heads} groups":
            config.num_attention_heads % config.num_key_value_heads == 0,
        f"head_dim {config.head_dim}": config.head_dim % 2 == 0,
        f"rope_type {rope.get('rope_type')!r}": rope.get("rope_type", "default") == "default",
    }  # fmt: skip
    return ", ".join(rule for rule, holds in rules.items() if not holds)
