"""What each algorithm makes of a head: error of weights and of layer outputs, and acceptance.

    python benchmarks/quantize/algorithms.py --base BASE --data DATA --head HEAD --recipe RECIPE \
        --work FOLDER --out OUT.json

On a GPU all algorithms, on a CPU `max` alone. Weight error is relative, in Frobenius norm, over all
experts of a layer; output error that of what the layer's step gives, on the calibration rows, both
layers reading the unquantized chain's states. Acceptance is replayed on the same continuations for
all, with the paired interval against BF16. An algorithm that raises is reported with its error.
OUT.json is written anew after each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any, get_args

import torch

from graft.manifest import HeadFolder, write_head
from mtp.acceptance import continue_prompts
from mtp.data.prompts import evaluation_prompts
from mtp.recipe import load_recipe, trained_for
from mtp.teacher import Teacher
from quantize.calibration import Algorithm, Scheme
from quantize.experts import calibrate_head, calibration_rows, pack_head
from quantize.gate import Replay, paired_difference, replay_head
from quantize.layerwise import layer_tensors, load_layer, visits


def weight_errors(source: HeadFolder, written: HeadFolder) -> list[dict[str, float]]:
    """Relative error of each projection's experts, a layer each."""
    errors = []
    for layer in range(source.num_layers):
        before, after = layer_tensors(source, layer), layer_tensors(written, layer)
        errors.append(
            {
                name.rpartition(".")[2]: (
                    (after[name].float() - stack.float()).norm() / stack.float().norm()
                ).item()
                for name, stack in before.items()
                if ".mlp.experts." in name
            }
        )
    return errors


def output_errors(
    source: HeadFolder, written: HeadFolder, teacher: Teacher, rows: list[torch.Tensor]
) -> list[float]:
    """Relative error of each routed step's outputs, with the same inputs."""
    errors = []
    states = [teacher.hidden(row) for row in rows]
    turns = visits(teacher, rows, states, source.num_layers, source.num_layers, stock=False)
    for visit in turns:
        right = visit.run(load_layer(source, visit.layer, teacher.device))
        found = visit.run(load_layer(written, visit.layer, teacher.device))
        pairs = [
            (a, b) for x, y in zip(right, found, strict=True) for a, b in zip(x, y, strict=True)
        ]
        difference = sum((a - b).square().sum().item() for a, b in pairs)
        errors.append((difference / sum(a.square().sum().item() for a, _ in pairs)) ** 0.5)
    return errors


def try_algorithm(
    algorithm: Algorithm,
    scheme: Scheme,
    source: HeadFolder,
    teacher: Teacher,
    rows: list[torch.Tensor],
    text: Any,
    before: Replay,
    folder: Path,
) -> dict[str, Any]:
    """One row of the table."""
    num_steps, runtime = trained_for(source.metadata["provenance"], source.num_layers)
    started = time.monotonic()
    scales, coverage = calibrate_head(
        source, teacher, rows, scheme, algorithm, num_steps=num_steps, runtime=runtime
    )
    calibrated = time.monotonic()
    tensors = pack_head(source, scales)
    packed = time.monotonic()
    folder.mkdir(parents=True)
    form = "nvfp4-modelopt" if scheme == "w4a4" else "nvfp4-modelopt-w4a16"
    write_head(folder, tensors, source.metadata | {"form": form})
    written = HeadFolder(folder)
    after = replay_head(teacher, written, text, num_steps, runtime)
    return {
        "algorithm": algorithm,
        "calibrate_seconds": calibrated - started,
        "pack_seconds": packed - calibrated,
        "never_routed": [len(layer["never_routed"]) for layer in coverage],
        "weight_error": weight_errors(source, written),
        "output_error": output_errors(source, written, teacher, rows),
        "acceptance": after.metrics,
        "difference": paired_difference(before.counts, after.counts),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("base", "data", "head", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--scheme", choices=get_args(Scheme), default="w4a4")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    recipe, source = load_recipe(options.recipe), HeadFolder(options.head)
    teacher = Teacher.load(options.base, device=options.device)
    prompts = evaluation_prompts(
        options.data,
        num_prompts=recipe.eval.num_prompts,
        max_prompt_tokens=recipe.eval.max_prompt_tokens,
    )
    num_steps, runtime = trained_for(source.metadata["provenance"], source.num_layers)
    text = continue_prompts(teacher, prompts, recipe.eval.num_tokens, num_steps)
    before = replay_head(teacher, source, text, num_steps, runtime)
    rows = calibration_rows(options.data, recipe.quantize.calibration_tokens)
    algorithms = get_args(Algorithm) if teacher.device.type == "cuda" else ("max",)
    table: list[dict[str, Any]] = []
    report = {
        "schema_version": 1,
        "scheme": options.scheme,
        "device": str(teacher.device),
        "device_name": torch.cuda.get_device_name() if teacher.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "before": before.metrics,
        "algorithms": table,
    }
    for algorithm in algorithms:
        folder = options.work / algorithm
        shutil.rmtree(folder, ignore_errors=True)
        try:
            table.append(
                try_algorithm(
                    algorithm, options.scheme, source, teacher, rows, text, before, folder
                )
            )
        except Exception as error:  # a row of the table, not the end of it
            table.append({"algorithm": algorithm, "error": f"{type(error).__name__}: {error}"})
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
