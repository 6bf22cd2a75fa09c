"""Serve one case and compare: `python run_case.py NAME FOLDER`, in a process of its own.

Prints its findings as one line of JSON. An engine that fails ends it with a traceback: the test
that started it reads both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "vllm")]
os.environ["TRITON_F32_DEFAULT"] = "ieee"
# Several engines of one configuration may start at once, and a sabotaged one must not be reused.
os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
# Functions are sent to the workers, which are other processes where they are several.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
# NVLink multicast, which NCCL and torch have off on shared hosts; vLLM has its own switch.
os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

import recorder  # noqa: E402
from build_tiny import TINY_NOISE, build  # noqa: E402
from cases import CASES, Case  # noqa: E402
from comparison import Comparison, prompts  # noqa: E402
from reference import Draft, ReferenceChain  # noqa: E402


def start(case: Case, folder: Path) -> Any:
    """The engine of a case, sabotaged if it is to be."""
    from vllm import LLM

    from mtp.serving import vllm_plugin

    os.environ["MTP_GRAFT_ROUTING"] = "off" if case.sabotage == "stock" else "on"
    if case.num_gpus == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if case.sabotage == "compiled index":
        pass_on = vllm_plugin.pass_index_on

        def compiled(model: Any) -> None:
            pass_on(model)
            model.do_not_compile = model.model.do_not_compile = False

        vllm_plugin.pass_index_on = compiled
    options = {
        "dtype": case.build.get("dtype", "float32"), "max_model_len": 256,
        "attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.04,
        "kernel_config": {"enable_jit_warmup": False}, "enable_prefix_caching": False,
    }  # fmt: skip
    if "layer_types" in case.build:
        options["gdn_prefill_backend"] = "triton"
    if "num_gpu_blocks_override" not in case.engine:
        options["kv_cache_memory_bytes"] = 1 << 28
    speculative = {"method": "mtp", "num_speculative_tokens": case.num_steps, **case.speculative}
    llm = LLM(
        str(folder), skip_tokenizer_init=True, disable_log_stats=False,
        speculative_config=speculative, **options | case.engine,
    )  # fmt: skip
    if case.sabotage in recorder.SABOTAGE:
        llm.collective_rpc(recorder.SABOTAGE[case.sabotage])
    return llm


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Serve and compare."""
    from vllm import SamplingParams

    build(folder, **TINY_NOISE | case.build)
    started = time.perf_counter()
    llm = start(case, folder)
    speculator = llm.collective_rpc(recorder.attach)[0]
    ready = time.perf_counter()
    parameters = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in case.max_tokens or [16 + 3 * i for i in range(len(case.lengths))]
    ]
    given = prompts(case.shared_prefix, case.lengths)
    outputs = llm.generate(given, parameters, use_tqdm=False)
    served = time.perf_counter()
    preemptions = sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    recorded = llm.collective_rpc(recorder.collect)[0]
    drafts = [Draft(*draft) for draft in recorded.pop("drafts")]
    found = Comparison(ReferenceChain(folder), drafts, outputs, case.near_tie)
    margins = sorted(found.margins)
    return {
        "speculator": speculator,
        "num_drafts": found.num_drafts,
        "num_wrong": found.num_wrong,
        "num_ties": found.num_ties,
        "num_wrong_tokens": found.num_wrong_tokens,
        "num_tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        "accepted": {str(k): v for k, v in sorted(found.accepted.items())},
        "differing_margins": [round(m, 4) for m in sorted(found.differing_margins)[-10:]],
        "margin_quantiles": [margins[len(margins) * q // 100] for q in (1, 5, 25, 50)],
        "share_of_margins_below_near_tie": sum(m < case.near_tie for m in margins) / len(margins),
        "num_preemptions": preemptions,
        "seconds_to_start": round(ready - started, 1),
        "seconds_to_serve": round(served - ready, 1),
        "seconds_to_compare": round(time.perf_counter() - served, 1),
        **recorded,
    }


def main(name: str, folder: Path) -> None:
    import torch

    torch.set_num_threads(4)
    case = CASES[name]
    found = {"case": name, "expect": case.expect, "near_tie": case.near_tie, **run(case, folder)}
    print(json.dumps(found | {"engine": dataclasses.asdict(case)["engine"]}, default=str))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
