"""Kernels and GPU time of one engine step: `python profile_step.py WORK/rounds NAME OUT.json`.

One request, decoding, with what the variant NAME of variants.json serves. The profiler sees the
kernels inside CUDA graphs one by one; its own cost is on the host, so times of kernels stand and
wall-clock times do not.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

NUM_STEPS = 30


def main(folder: Path, name: str, out: Path) -> None:
    spec = json.loads((folder / "variants.json").read_text())
    variant = spec["variants"][name]
    os.environ |= {k: v for k, v in variant["environment"].items() if k != "PYTHONPATH_FIRST"}
    if first := variant["environment"].get("PYTHONPATH_FIRST"):
        sys.path.insert(0, first)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import SamplingParams
    from worker import start

    llm: Any = start(variant)
    sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("0", {"prompt_token_ids": spec["prompts"][0]}, sampling)
    for _ in range(10):
        llm.llm_engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            llm.llm_engine.step()
        torch.cuda.synchronize()
    count: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count[event.name] += 1
            microseconds[event.name] += event.device_time
    report = {
        "variant": name,
        "kernels_per_step": count.total() / NUM_STEPS,
        "microseconds_per_step": microseconds.total() / NUM_STEPS,
        "most_time": [
            {"kernel": kernel[:120], "per_step": count[kernel] / NUM_STEPS,
             "microseconds_per_step": round(time / NUM_STEPS, 2)}
            for kernel, time in microseconds.most_common(40)
        ],
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=1))
    print(name, f"{report['kernels_per_step']:.0f} kernels,",
          f"{report['microseconds_per_step']:.0f} us of them a step")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
