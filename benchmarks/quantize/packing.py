"""Packing one layer's experts: ours against modelopt's own export, in one run, on the same weights.

    OMP_NUM_THREADS=2 python benchmarks/quantize/packing.py > OUT.json

Full size by default (256 experts, hidden 2048, expert width 512). Beside the wall clock stand CPU
seconds of all threads, for a machine that does other work too. Calibration is outside both clocks:
both start from the largest magnitude of each expert. Every byte of both results is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from quantize.calibration import quiet
from quantize.packing import Packed, WeightScales, largest, pack

NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
QUANTIZERS = [
    {"quantizer_name": "*", "enable": False},
    {"quantizer_name": "*weight_quantizer*", "cfg": NVFP4},
]


class Experts(nn.Module):
    """Fused experts as modelopt recognises them; they never run here."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.num_experts, self.intermediate_dim = gate_up.shape[0], gate_up.shape[1] // 2
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


Seconds = tuple[float, float]  # wall, CPU


def clock() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(started: Seconds) -> Seconds:
    wall, cpu = clock()
    return wall - started[0], cpu - started[1]


def with_modelopt(gate_up: torch.Tensor, down: torch.Tensor) -> tuple[Seconds, dict[str, Any]]:
    """Seconds of `_export_fused_experts`, and its tensors."""
    with quiet():
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.moe_utils import _export_fused_experts

        model = nn.Module()
        model.experts = Experts(gate_up, down)
        mtq.quantize(model, {"quant_cfg": QUANTIZERS, "algorithm": "max"}, None)
        started = clock()
        _export_fused_experts(model.experts, torch.bfloat16)
        return since(started), model.experts.state_dict()


def with_ours(gate_up: torch.Tensor, down: torch.Tensor) -> tuple[Seconds, tuple[Packed, Packed]]:
    """Seconds of `pack`, largest magnitudes included, and its tensors."""
    started = clock()
    packed = [pack(weight, WeightScales(amax=largest(weight))) for weight in (gate_up, down)]
    return since(started), (packed[0], packed[1])


def num_different(ours: tuple[Packed, Packed], theirs: dict[str, Any], width: int) -> int:
    """Tensors in which both results differ in any bit."""
    gate_up, down = ours
    parts = {
        "gate_proj": gate_up.rows(0, width),
        "up_proj": gate_up.rows(width, 2 * width),
        "down_proj": down,
    }
    different = 0
    for expert in range(down.weight.shape[0]):
        for name, packed in parts.items():
            for part in ("weight", "weight_scale", "weight_scale_2"):
                a = getattr(packed, part)[expert].contiguous().reshape(-1).view(torch.uint8)
                b = theirs[f"{expert}.{name}.{part}"].contiguous().reshape(-1).view(torch.uint8)
                different += not torch.equal(a, b)
    return different


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3, help="of ours; modelopt runs once")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (options.experts, 2 * options.width, options.hidden),
        (options.experts, options.hidden, options.width),
    )
    gate_up, down = (
        torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
        for shape in shapes
    )
    # A small run first, so that neither pays for what starts once.
    with_ours(gate_up[:2], down[:2])
    with_modelopt(gate_up[:2].clone(), down[:2].clone())
    runs = [with_ours(gate_up, down) for _ in range(options.repeats)]
    seconds, theirs = with_modelopt(gate_up, down)
    ours = [min(run[0][kind] for run in runs) for kind in range(2)]
    report = {
        "schema_version": 1,
        "experts": options.experts, "hidden": options.hidden, "width": options.width,
        "parameters": gate_up.numel() + down.numel(),
        "ours_seconds": [run[0][0] for run in runs], "modelopt_seconds": seconds[0],
        "ours_cpu_seconds": [run[0][1] for run in runs], "modelopt_cpu_seconds": seconds[1],
        "times_faster": seconds[0] / ours[0], "times_faster_cpu": seconds[1] / ours[1],
        "tensors_that_differ": num_different(runs[-1][1], theirs, options.width),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": torch.get_num_threads(), "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__, "modelopt": version("nvidia-modelopt"),
        "python": platform.python_version(),
    }  # fmt: skip
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
