"""From a BF16 head to the tensors of its NVFP4 form: calibrate each layer in the chain, pack.

Only the routed experts are quantized: they are 96 % of the head's bytes at the 35B's sizes, and
public reports of wholly quantized drafters lost acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from graft.manifest import HeadFolder
from graft.modules import is_multimodal, linear_modules
from graft.reader import Checkpoint
from graft.schemes import identify, read_statement
from mtp.acceptance import Runtime
from mtp.data.store import load_prepared
from mtp.progress import track
from mtp.router_load import RouterLoad
from mtp.teacher import Teacher
from quantize.calibration import (
    Algorithm,
    LayerScales,
    ProjectionScales,
    Scheme,
    calibrate,
    quantized_experts,
    read_scales,
)
from quantize.layerwise import layer_tensors, load_layer, visits
from quantize.packing import FP4_MAX, FP8_MAX, pack

ALGOS: dict[Scheme, str] = {"w4a4": "NVFP4", "w4a16": "W4A16_NVFP4"}


def calibrate_head(
    source: HeadFolder,
    teacher: Teacher,
    rows: Sequence[torch.Tensor],
    scheme: Scheme,
    algorithm: Algorithm = "max",
    *,
    num_steps: int,
    runtime: Runtime,
) -> tuple[list[LayerScales], list[dict[str, Any]]]:
    """Scales of every layer, each from its own inputs in the chain that the runtime executes.

    Layers that the runtime never runs are calibrated where a routed one would run them.

    Returns:
        The scales by layer; and by layer {"layer", "steps", "never_routed": experts that no token
        reached, whose weight scales are their own weights' and whose input scale is the layer's}.

    Raises:
        UserError: W4A4 and a layer that saw no token.
    """
    found: dict[int, LayerScales] = {}
    coverage: dict[int, dict[str, Any]] = {}
    states = [teacher.hidden(row) for row in track(rows, "base reads", unit="row")]
    turns = visits(
        teacher,
        rows,
        states,
        source.num_layers,
        num_steps,
        stock=runtime == "stock",
        idle_layers=True,
    )
    for visit in turns:
        # modelopt finds an expert by the offset of its weight, which other implementations hide.
        head = load_layer(source, visit.layer, teacher.device, experts_implementation="eager")
        load = RouterLoad(head)
        calibrate(head, visit.run, scheme, algorithm)
        (_, experts), *_ = quantized_experts(head)
        scales = read_scales(experts, scheme)
        unseen = {expert for layer in load.read() for expert in layer.unused()}
        if visit.layer in found:  # more steps than layers: this one runs again
            scales = _larger_inputs(found[visit.layer], scales)
            unseen &= set(coverage[visit.layer]["never_routed"])
        found[visit.layer] = scales
        earlier = coverage.get(visit.layer, {"steps": []})["steps"]
        coverage[visit.layer] = {
            "layer": visit.layer, "steps": [*earlier, *visit.steps],
            "never_routed": sorted(unseen),
        }  # fmt: skip
        del head, experts  # before the next layer is loaded
    layers = range(source.num_layers)
    return [found[layer] for layer in layers], [coverage[layer] for layer in layers]


def _larger_inputs(first: LayerScales, again: LayerScales) -> LayerScales:
    """The first turn's weight scales, and the larger input of both."""
    return {
        name: ProjectionScales(
            weight=one.weight,
            input_amax=None if one.input_amax is None
            else max(one.input_amax, again[name].input_amax or 0.0),
        )
        for name, one in first.items()
    }  # fmt: skip


def pack_head(source: HeadFolder, scales: list[LayerScales]) -> dict[str, torch.Tensor]:
    """The tensors of the NVFP4 head, per expert, as modelopt names them; layer by layer."""
    tensors = {
        name: source.load(name).to(torch.bfloat16)
        for name in source.names
        if ".mlp.experts." not in name
    }
    for layer, found in enumerate(track(scales, "packing", unit="layer")):
        stacks = layer_tensors(source, layer)
        prefix = f"mtp.layers.{layer}.mlp.experts"
        for projection, projection_scales in found.items():
            stack = stacks[f"{prefix}.{projection}"]
            tensors |= _packed_tensors(prefix, projection, stack, projection_scales)
    return tensors


def _packed_tensors(
    prefix: str, projection: str, stack: torch.Tensor, scales: ProjectionScales
) -> dict[str, torch.Tensor]:
    packed = pack(stack, scales.weight)
    half = stack.shape[1] // 2
    parts = {"down_proj": packed}
    if projection == "gate_up_proj":
        parts = {"gate_proj": packed.rows(0, half), "up_proj": packed.rows(half, 2 * half)}
    tensors = {}
    for name, part in parts.items():
        for expert in range(stack.shape[0]):
            module = f"{prefix}.{expert}.{name}"
            tensors[f"{module}.weight"] = part.weight[expert]
            tensors[f"{module}.weight_scale"] = part.weight_scale[expert]
            tensors[f"{module}.weight_scale_2"] = part.weight_scale_2[expert]
            if scales.input_amax is not None:
                amax = torch.tensor(scales.input_amax, dtype=torch.float32)
                tensors[f"{module}.input_scale"] = amax / (FP4_MAX * FP8_MAX)
    return tensors


def calibration_rows(data: Path, num_tokens: int) -> list[torch.Tensor]:
    """[1, T] token ids of training rows, `num_tokens` or a little more where the data has them.

    Single rows: padding would be calibrated on as if it were text.
    """
    chosen, seen = [], 0
    for row in load_prepared(data)["train"].shuffle(seed=0):
        chosen.append(torch.tensor(row["input_ids"]).unsqueeze(0))
        seen += chosen[-1].numel()
        if seen >= num_tokens:
            break
    return chosen


def matching_scheme(checkpoint: Checkpoint) -> Scheme:
    """W4A16 where the base's own quantization takes no input scales, else W4A4."""
    modules = linear_modules(checkpoint.infos(), is_multimodal(checkpoint.config))
    trunk = [module for module in modules if not module.is_head]
    statement = read_statement(checkpoint)
    scheme = identify(statement, trunk, str(checkpoint.folder))
    form = scheme.nvfp4_form(statement, trunk, "nvfp4-modelopt")
    return "w4a16" if form.endswith("w4a16") else "w4a4"


def producer() -> dict[str, str]:
    """Whose format this is, for the configs that name it."""
    from importlib.metadata import version

    return {"name": "modelopt", "version": version("nvidia-modelopt")}
