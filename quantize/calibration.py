"""Calibration by nvidia-modelopt: its quantizers watch the experts while real text runs through.

modelopt wraps fused experts as they are: one weight quantizer an expert, one input quantizer a
projection. So an expert that no token reaches still has both scales. Only the numbers are taken
from it; its packing is `quantize.packing`, the same bytes sooner.

`max` runs anywhere. The other algorithms choose each block's scale by trying several, in kernels
that need CUDA; what they choose is stated in the same format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from graft.errors import UserError
from quantize.lazy_modelopt import modelopt_module, quiet
from quantize.packing import AMAX_OF_ZEROS, FP8_MAX, WeightScales

Scheme = Literal["w4a4", "w4a16"]
Algorithm = Literal["max", "mse", "local_hessian", "four_over_six"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
PROJECTIONS = ("gate_up_proj", "down_proj")
FOUR_OVER_SIX_MAX = 256.0  # modelopt's largest block scale there; 448 would not hold the 1.5x ones
# FP4 E2M1 values, blocks of 16 along the input dimension, FP8 E4M3 block scales.
_FORMAT = {"num_bits": (2, 1)}
_BLOCKS = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
_STATIC = _BLOCKS | {"type": "static"}
# Of each algorithm: the weights' blocks and modelopt's settings (its presets of these names).
ALGORITHMS: dict[Algorithm, tuple[dict[Any, Any], str | dict[str, Any]]] = {
    "max": (_BLOCKS, "max"),
    "mse": (_STATIC, {"method": "mse", "fp8_scale_sweep": True}),
    "local_hessian": (_STATIC, {"method": "local_hessian", "fp8_scale_sweep": True}),
    "four_over_six": (
        _STATIC | {"four_over_six": True},
        {"method": "mse", "fp8_scale_sweep": False, "start_multiplier": 1.0,
         "stop_multiplier": 1.5, "step_size": 0.5},
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProjectionScales:
    """What calibration says of one projection of a layer's experts.

    input_amax: the largest magnitude of its inputs, over all experts; None for W4A16.
    """

    weight: WeightScales
    input_amax: float | None


LayerScales = dict[str, ProjectionScales]  # by projection, as in PROJECTIONS


def require_algorithm(algorithm: Algorithm, device: torch.device) -> None:
    """Refuse an algorithm whose kernels this device can't run.

    Raises:
        UserError: anything but `max` outside CUDA.
    """
    if algorithm != "max" and device.type != "cuda":
        raise UserError(
            f"a CUDA device for --algorithm {algorithm}, whose kernels modelopt has for CUDA only",
            f"device {device.type}",
            "use --algorithm max, or run on a GPU",
        )


def quantizer_config(
    scheme: Scheme, algorithm: Algorithm = "max", backend: str | None = None
) -> dict[str, Any]:
    """modelopt's configuration: the routed experts, and nothing else.

    Args:
        scheme: "w4a16" leaves the inputs alone.
        algorithm: how block scales are chosen.
        backend: name of a registered backend that quantizes in the forward pass.
    """
    blocks, settings = ALGORITHMS[algorithm]
    common = _FORMAT | ({"backend": backend} if backend else {})
    quantizers: list[dict[str, Any]] = [
        {"quantizer_name": "*", "enable": False},
        # The trailing * matters: one weight quantizer an expert, in a list.
        {"quantizer_name": "*mlp.experts.*weight_quantizer*",
         "cfg": common | {"block_sizes": blocks}},
    ]  # fmt: skip
    if scheme == "w4a4":
        quantizers.append(
            {
                "quantizer_name": "*mlp.experts.*input_quantizer",
                "cfg": common | {"block_sizes": _BLOCKS},
            }
        )
    return {"quant_cfg": quantizers, "algorithm": settings}


def calibrate(
    model: nn.Module,
    forward_loop: Callable[[Any], object],
    scheme: Scheme,
    algorithm: Algorithm = "max",
    backend: str | None = None,
) -> None:
    """Put modelopt's quantizers around the experts of `model` and let them watch `forward_loop`.

    Raises:
        UserError: modelopt found no experts, or they saw a NaN or an infinity.
    """
    mtq = modelopt_module("quantization")
    linear = torch.nn.functional.linear
    try:
        with quiet():
            mtq.quantize(model, quantizer_config(scheme, algorithm, backend), forward_loop)
    except AssertionError as error:
        if "values in amax" not in str(error):
            raise
        raise UserError(
            "finite weights and inputs of every expert",
            f"what modelopt says of them: {error}",
            "look at the training run: this model computes no drafts",
        ) from error
    finally:
        # An exception in the experts leaves modelopt's own in its place, for the whole process.
        torch.nn.functional.linear = linear
    if not any(True for _ in quantized_experts(model)):
        raise UserError(
            "fused experts that modelopt can wrap (num_experts, 3-D gate_up_proj and down_proj)",
            f"none in {type(model).__name__}",
            "use the transformers version that this project asks for",
        )


def quantized_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of the experts that modelopt wrapped."""
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj_weight_quantizers"):
            yield name, module


def read_scales(experts: Any, scheme: Scheme) -> LayerScales:
    """What modelopt found for the experts of one layer.

    Raises:
        UserError: W4A4 whose experts saw no token.
    """
    scales: LayerScales = {}
    for projection in PROJECTIONS:
        weight = getattr(experts, projection)
        quantizers = getattr(experts, f"{projection}_weight_quantizers")
        input_amax = _input_amax(experts, projection) if scheme == "w4a4" else None
        scales[projection] = ProjectionScales(
            weight=_weight_scales(list(quantizers), weight), input_amax=input_amax
        )
    return scales


def _input_amax(experts: Any, projection: str) -> float:
    found = getattr(experts, f"{projection}_input_quantizer").amax
    amax = None if found is None else found.float().item()
    if amax == 0 and projection == "down_proj" and not experts.gate_up_proj.any():
        return AMAX_OF_ZEROS  # a layer of zeros: the inputs are 0 for every token
    if amax is None or not 0 < amax < float("inf"):
        raise UserError(
            f"an input_scale above 0 for {projection}",
            "no token that reached an expert" if amax is None else f"{amax}",
            "calibrate with more tokens",
        )
    return amax


def _weight_scales(quantizers: list[Any], weight: torch.Tensor) -> WeightScales:
    """[E] tensor scales, and block scales where the quantizers are static."""
    if getattr(quantizers[0], "global_amax", None) is None:
        return WeightScales(amax=torch.stack([q.amax.float().reshape(()) for q in quantizers]))
    blocks = torch.stack([q.amax.float().reshape(weight.shape[1], -1) for q in quantizers])
    four_over_six = (quantizers[0].block_sizes or {}).get("four_over_six", False)
    return WeightScales(
        amax=torch.stack([q.global_amax.float().reshape(()) for q in quantizers]),
        block_amax=blocks,
        scale_max=FOUR_OVER_SIX_MAX if four_over_six else FP8_MAX,
    )
