"""What is served on Model Runner V2, and what must come of it: one row a case.

Float32 with exact products (TRITON_F32_DEFAULT=ieee), so that hardly anything ties, wherever the
kernels take it; else bf16, against a float32 reference of the bf16 weights, with the margin below
which a difference is a tie. Prompts are at least K-1 tokens long, but in the cases that are about
short ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LENGTHS = (5, 9, 20, 40, 8, 60, 17, 33, 11, 25)
SHORT_LENGTHS = (1, 2, 20, 1, 2, 40, 1, 2, 17, 1, 2, 33)
JOINING = {"max_num_batched_tokens": 24, "max_num_seqs": 3}
TOGETHER = {"max_num_batched_tokens": 512, "max_num_seqs": 16}
BESIDE = {"max_num_batched_tokens": 512, "max_num_seqs": 5, "block_size": 16,
          "num_gpu_blocks_override": 40}  # fmt: skip
EAGER = {"enforce_eager": True}
GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 5, 8, 10, 15, 20, 40, 80]}}
BF16 = {"dtype": "bfloat16"}
BF16_TIE = 3.0  # of logits that are up to 100 high


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine and what is expected of it.

    build: arguments of `build_tiny.build`. engine, speculative: more arguments of `vllm.LLM` and of
    its speculative_config. expect: "parity" (every draft is the reference's, all rejection lengths
    occur, and no token is wrong), "wrong" (a negative control: drafts differ), "lossless" (drafts
    are not compared, tokens are). sabotage: a key of `recorder.SABOTAGE`, "compiled index" or
    "stock".
    """

    expect: Literal["parity", "wrong", "lossless"] = "parity"
    num_steps: int = 4
    build: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS
    max_tokens: tuple[int, ...] | None = None
    shared_prefix: int = 0
    sabotage: str | None = None
    near_tie: float = 1e-2
    num_gpus: int = 1


def layers(num_layers: int, num_steps: int, **more: Any) -> Case:
    return Case(
        build={"num_mtp_layers": num_layers},
        num_steps=num_steps,
        # A batch must hold every request's drafts.
        engine={**EAGER, **JOINING, "max_num_batched_tokens": 24 if num_steps < 8 else 40},
        lengths=tuple(max(length, num_steps) for length in LENGTHS),
        **more,
    )


HYBRID = {"layer_types": ("linear_attention",) * 3 + ("full_attention",), "trunk_noise": 2.1}
HYBRID_BF16: dict[str, Any] = {"build": HYBRID | BF16, "near_tie": BF16_TIE}
FULL_BF16: dict[str, Any] = {"build": BF16, "near_tie": BF16_TIE}

CASES: dict[str, Case] = {
    "one batch": Case(engine={**EAGER, **TOGETHER}),
    "chunks, joining and leaving": Case(engine={**EAGER, **JOINING}),
    "chunks, synchronous": Case(engine={**EAGER, **JOINING, "async_scheduling": False}),
    "preemption": Case(
        engine={**EAGER, "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 128,
                "num_gpu_blocks_override": 16, "block_size": 32},
    ),
    "prefix caching": Case(
        engine={**EAGER, "max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 32,
                "enable_prefix_caching": True},
        shared_prefix=70,
    ),
    "graphs, one batch": Case(engine={**GRAPHS, **TOGETHER}),
    "graphs, chunks": Case(engine={**GRAPHS, **JOINING}),
    "graphs, bf16": Case(engine={**GRAPHS, **TOGETHER}, **FULL_BF16),
    "graphs, synchronous": Case(engine={**GRAPHS, **TOGETHER, "async_scheduling": False}),
    "fp8 cache": Case(
        engine={**GRAPHS, **TOGETHER, "kv_cache_dtype": "fp8"}, **FULL_BF16 | {"near_tie": 10.0}
    ),
    "backends in the speculative config": Case(
        engine={**GRAPHS, **TOGETHER}, **FULL_BF16,
        speculative={"attention_backend": "TRITON_ATTN", "moe_backend": "triton"},
    ),
    "another attention for the draft": Case(
        engine={**GRAPHS, **TOGETHER}, **FULL_BF16, speculative={"attention_backend": "FLASH_ATTN"}
    ),
    "tensor parallel": Case(engine={**GRAPHS, **TOGETHER, "tensor_parallel_size": 2}, num_gpus=2),
    "tensor parallel, hybrid": Case(
        engine={**GRAPHS, **TOGETHER, "tensor_parallel_size": 2}, num_gpus=2, **HYBRID_BF16
    ),
    "mrope in a text-only config": Case(build={"mrope": True}, engine={**EAGER, **JOINING}),
    "hybrid": Case(engine={**EAGER, **JOINING}, **HYBRID_BF16),
    "hybrid, graphs": Case(engine={**GRAPHS, **TOGETHER}, **HYBRID_BF16),
    "hybrid, prefix caching": Case(
        engine={**EAGER, **JOINING, "enable_prefix_caching": True}, **HYBRID_BF16, shared_prefix=70
    ),
    "short prompts": Case(engine={**EAGER, **TOGETHER}, lengths=SHORT_LENGTHS),
    # Blocks go round, so that a prompt's block comes to lie behind a full one of another request.
    "prompts beside full blocks": Case(
        engine={**EAGER, **BESIDE}, lengths=(40, 33, *[4] * 60), max_tokens=(200, 200, *[6] * 60)
    ),
    # After a rejection vLLM 0.33 runs positions below 0 again, whose cache slots are another's:
    # 3 of 332 drafts were wrong on 2026-11-30. The tokens must stay right.
    "short prompts beside full blocks": Case(
        engine={**EAGER, **BESIDE}, lengths=(40, 33, *[1] * 60), max_tokens=(200, 200, *[6] * 60),
        expect="lossless",
    ),
    "short prompts, hybrid": Case(
        engine={**EAGER, **TOGETHER}, **HYBRID_BF16, lengths=SHORT_LENGTHS
    ),
    "2 layers": layers(2, 2),
    "3 layers": layers(3, 3),
    "6 layers": layers(6, 6),
    "8 layers": layers(8, 8),
    "2 steps of 4 layers": layers(4, 2),
    "8 steps of 4 layers": layers(4, 8, expect="lossless"),
    "index dropped": Case(
        engine={**EAGER, **TOGETHER}, sabotage="index dropped", expect="wrong"
    ),
    "compiled index": Case(
        engine={**GRAPHS, **TOGETHER}, sabotage="compiled index", expect="wrong"
    ),
    "stale entries": Case(
        engine={**EAGER, **TOGETHER}, sabotage="stale entries", expect="wrong"
    ),
    "known tokens": Case(engine={**EAGER, **JOINING}, sabotage="known tokens", expect="wrong"),
    "stock": Case(engine={**EAGER, **TOGETHER}, sabotage="stock", expect="wrong"),
    "stock, short prompts": Case(
        engine={**EAGER, **TOGETHER}, lengths=SHORT_LENGTHS, sabotage="stock", expect="lossless"
    ),
    "stock, mrope in a text-only config": Case(
        build={"mrope": True}, engine={**EAGER, **JOINING}, sabotage="stock", expect="lossless"
    ),
    "stock, fp8 cache": Case(
        engine={**GRAPHS, **TOGETHER, "kv_cache_dtype": "fp8"}, sabotage="stock", expect="wrong",
        **FULL_BF16 | {"near_tie": 10.0},
    ),
}  # fmt: skip
