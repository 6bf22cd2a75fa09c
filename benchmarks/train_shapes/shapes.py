"""Qwen3.5-35B-A3B's head by its shapes, a tiny one for rehearsals, and what a step must compute.

Model FLOPs are the matrix products that a step cannot do without: what is computed again, and
everything elementwise, is left out. A trained weight takes part in three products a token (forward,
gradient by input, gradient by weight); the frozen `lm_head` in two, since nobody wants its own
gradient; the base's logits in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUM_LAYERS = 4
REAL: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "vocab_size": 248320,
    "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention",
                    "full_attention"] * 10,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
    "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10]},
}  # fmt: skip
TINY = REAL | {
    "hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "layer_types": REAL["layer_types"][:4],
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "max_position_embeddings": 512,
    "rope_parameters": REAL["rope_parameters"] | {"mrope_section": [1, 1, 0]},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of one micro-batch.

    layers: fc, attention and experts of all positions, forward and backward.
    student_logits: of all positions, forward and gradient by hidden states.
    teacher_logits: once a token.
    """

    layers: int
    student_logits: int
    teacher_logits: int

    @property
    def total(self) -> int:
        return self.layers + self.student_logits + self.teacher_logits

    @property
    def total_if_lm_head_were_trained(self) -> int:
        """With three products for `lm_head`, as for a weight that is trained."""
        return self.layers + self.student_logits * 3 // 2 + self.teacher_logits


def weights_per_token(config: dict[str, Any]) -> int:
    """Weights of an MTP layer, and of `fc`, that one token meets in a matrix product."""
    hidden, per_expert = config["hidden_size"], 3 * config["hidden_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    attention = hidden * (2 * queries + 2 * keys + queries)  # query with its gate, key, value, out
    experts = config["num_experts_per_tok"] * per_expert * config["moe_intermediate_size"]
    shared = per_expert * config["shared_expert_intermediate_size"] + hidden
    router = hidden * config["num_experts"]
    return 2 * hidden * hidden + attention + experts + shared + router


def step_flops(
    config: dict[str, Any], *, rows: int, length: int, num_steps: int, with_teacher: bool = True
) -> StepFlops:
    """FLOPs of training on `rows` full rows of `length` tokens, all of them supervised."""
    windows = [length - 1 - k for k in range(num_steps)]
    queries = config["num_attention_heads"] * config["head_dim"]
    products = sum(windows) * weights_per_token(config)
    # Scores and their product with the values, over the causal half.
    attention = sum(2 * queries * w * (w + 1) // 2 for w in windows)
    logits = config["hidden_size"] * config["vocab_size"]
    targets = [length - 2 - k for k in range(num_steps)]
    return StepFlops(
        layers=3 * 2 * rows * (products + attention),
        student_logits=2 * 2 * rows * sum(targets) * logits,
        teacher_logits=2 * rows * (length - 2) * logits if with_teacher else 0,
    )
