"""Bytes and peak memory of a head of full-size layers, before and after W4A4, on the disk.

    OMP_NUM_THREADS=1 python benchmarks/quantize/sizes.py --work /tmp/sizes > OUT.json

Four layers as in Qwen3.5-35B-A3B: hidden 2048, 256 experts of width 512, 16 query and 2 key-value
heads of 256. Weights are random, and random states stand in the base's place, so nothing here says
anything of acceptance; calibration, packing, writing and the checks are those of `mtp quantize`,
and the twin that of `--dequantize`. The BF16 head is made while it is written, so that peak memory
(VmHWM, reset before each stage) is the project's own. Needs 11 GB of disk, removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from memory import TEXT_CONFIG, RandomStates, resident

from graft.formats import head_tensors
from graft.index import write_json
from graft.manifest import HEAD_METADATA, HEAD_WEIGHTS, HeadFolder, head_metadata, write_head
from graft.writer import write_shard
from quantize.checks import check_written
from quantize.experts import calibrate_head, pack_head
from quantize.twin import dequantize

FULL_SIZE: dict[str, Any] = TEXT_CONFIG | {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "vocab_size": 248320,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10]},
}  # fmt: skip
CHUNK = 2**22  # values made at once


@dataclass(frozen=True)
class RandomTensor:
    """A BF16 tensor of random values, made while it is written; see `graft.convert.MadeTensor`."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def nbytes(self) -> int:
        return 2 * prod(self.shape)

    def chunks(self) -> Iterator[bytes]:
        left = prod(self.shape)
        while left:
            count = min(CHUNK, left)
            values = torch.empty(count, dtype=torch.bfloat16).normal_(std=0.02)
            yield values.view(torch.uint8).numpy().tobytes()
            left -= count


def write_random_head(folder: Path, num_layers: int, per_expert: bool) -> HeadFolder:
    form: Any = "bf16-per-expert" if per_expert else "bf16-fused"
    wanted = head_tensors(FULL_SIZE, num_layers, form)
    folder.mkdir()
    write_shard(folder / HEAD_WEIGHTS, [RandomTensor(n, shape) for n, (_, shape) in wanted.items()])
    metadata = head_metadata(
        num_layers=num_layers, form=form, text_config=FULL_SIZE, base_fingerprint={}, provenance={}
    )
    write_json(folder / HEAD_METADATA, metadata)
    return HeadFolder(folder)


def sizes(head: HeadFolder) -> dict[str, int]:
    """Bytes: of tensors, routed experts and the rest, and of the file that holds them."""
    experts = [info.nbytes for info in head.infos() if ".mlp.experts." in info.name]
    tensors = [info.nbytes for info in head.infos()]
    return {
        "num_tensors": len(tensors),
        "routed_experts": sum(experts),
        "everything_else": sum(tensors) - sum(experts),
        "tensors": sum(tensors),
        "file": (head.folder / HEAD_WEIGHTS).stat().st_size,
    }


class Stages:
    """Seconds and peak memory of each stage."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self.next()

    def next(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.started = time.perf_counter(), time.process_time()

    def end(self, name: str) -> None:
        wall, cpu = self.started
        self.found[name] = {
            "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu,
            "peak_bytes": resident("VmHWM"),
        }  # fmt: skip
        self.next()


def quantize_and_back(work: Path, num_layers: int, tokens: int, per_expert: bool) -> dict[str, Any]:
    stages, teacher = Stages(), RandomStates(FULL_SIZE["hidden_size"])
    start_bytes = resident("VmRSS")
    source = write_random_head(work / "bf16", num_layers, per_expert)
    stages.end("write the random BF16 head")
    rows = [torch.full((1, 128), number) for number in range(max(tokens // 128, 1))]
    source_of_states: Any = teacher
    scales, coverage = calibrate_head(
        source, source_of_states, rows, "w4a4", num_steps=num_layers, runtime="routed"
    )
    stages.end("calibrate")
    tensors = pack_head(source, scales)
    stages.end("pack")
    (work / "nvfp4").mkdir()
    write_head(work / "nvfp4", tensors, source.metadata | {"form": "nvfp4-modelopt"})
    del tensors
    stages.end("write")
    written = HeadFolder(work / "nvfp4")
    checks = check_written(written, source)
    stages.end("check")
    dequantize(work / "nvfp4", work / "twin")
    stages.end("dequantize")
    before, after, twin = (sizes(head) for head in (source, written, HeadFolder(work / "twin")))
    return {
        "before": before, "after": after, "twin": twin,
        "ratio_of_experts": after["routed_experts"] / before["routed_experts"],
        "ratio_of_tensors": after["tensors"] / before["tensors"],
        "bytes_at_the_start": start_bytes,
        "peak_bytes": max(stage["peak_bytes"] for stage in stages.found.values()),
        "stages": stages.found, "checks": checks,
        "never_routed": [len(layer["never_routed"]) for layer in coverage],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True, help="a folder to make and remove")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--per-expert", action="store_true", help="a head that is not fused")
    options = parser.parse_args()
    torch.manual_seed(0)
    options.work.mkdir(parents=True)
    try:
        found = quantize_and_back(options.work, options.layers, options.tokens, options.per_expert)
    finally:
        shutil.rmtree(options.work)
    report = {
        "schema_version": 1, "layers": options.layers, "tokens": options.tokens,
        "per_expert": options.per_expert, **found,
        "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
    }  # fmt: skip
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
