"""Is this head complete, well formed and finite? Asked before a graft and again after it.

vLLM's own check lists only norms on a BF16 base and is off on a quantized one, so a head with
missing experts or scales loads silently and drafts garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from graft.formats import NVFP4_SCALES, Form, head_tensors
from graft.reader import HEAD_PREFIX, TensorStore
from graft.values import FLOAT_DTYPES, float_values

FP8_BLOCK_SCALE = ".weight_scale_inv"
INPUT_NORM = ".input_layernorm.weight"
MAX_WEIGHT = 2688.0
"""No trained weight is this large; a forgotten reciprocal makes the largest one far larger."""
# The largest weight that a tensor scale allows: code 6, block scale 448.
LARGEST: dict[str, Callable[[float], float]] = {
    "weight_scale_2": lambda scale: 6 * 448 * scale,
    "weight_global_scale": lambda scale: 6 * 448 / scale,
}


def shape_problems(
    store: TensorStore,
    text_config: Mapping[str, Any],
    num_layers: int,
    form: Form,
    *,
    fp8_block: bool = False,
) -> list[str]:
    """Missing, unexpected and misshapen head tensors, all of them, from headers alone.

    With `fp8_block`, matrices may be F8_E4M3 beside a `weight_scale_inv`, as Qwen3.6-FP8 ships its
    own head; such a head is never written here.
    """
    wanted = head_tensors(text_config, num_layers, form)
    present = [name for name in store.names if name.startswith(HEAD_PREFIX)]
    if fp8_block:
        scales = {name for name in present if name.endswith(FP8_BLOCK_SCALE)}
        present = [name for name in present if name not in scales]
        for name in {scale.removesuffix("_scale_inv") for scale in scales} & wanted.keys():
            wanted[name] = ("F8_E4M3", wanted[name][1])
    problems = [f"{name} is missing" for name in wanted.keys() - set(present)]
    for name in present:
        if store.info(name).dtype == "U8" and len(store.info(name).shape) > 2:
            problems.append(f"{name} packs all experts in one tensor: vLLM finds no scales for it")
        if name not in wanted:
            problems.append(f"{name} does not belong to a {num_layers}-layer {form} head")
            continue
        dtype, shape = wanted[name]
        info = store.info(name)
        if (info.dtype, info.shape) != (dtype, shape):
            problems.append(f"{name} is {info.dtype} {list(info.shape)}, not {dtype} {list(shape)}")
    return sorted(problems)


def value_problems(store: TensorStore) -> list[str]:
    """Head tensors that no trained head holds, or that vLLM would load and misread.

    Not finite; scales that are not positive; gate and up with different tensor scales; a tensor
    scale stored as its own reciprocal; norms that are not stored around zero.
    """
    problems = []
    for name in sorted(name for name in store.names if name.startswith(HEAD_PREFIX)):
        dtype, part = store.info(name).dtype, name.rpartition(".")[2]
        if dtype not in FLOAT_DTYPES:
            continue
        for chunk in store.chunks(name):
            values = float_values(chunk, dtype)
            if not np.isfinite(values).all():
                problems.append(f"{name} has values that are not finite")
                break
            if part in NVFP4_SCALES and not (values > 0).all():
                problems.append(f"{name} has a scale that is not above zero")
                break
            if part in LARGEST and LARGEST[part](values[0]) > MAX_WEIGHT:
                problems.append(f"{name} is {values[0]:.3g}: the reciprocal of what is meant")
        if name.endswith((".gate_proj.weight_scale_2", ".gate_proj.weight_global_scale")):
            partner = name.replace(".gate_proj.", ".up_proj.")
            if partner in store and store.digest(name) != store.digest(partner):
                problems.append(f"{name} differs from {partner}: vLLM uses one for both")
    if near_one := norms_near_one(store):
        problems.append(
            f"{', '.join(near_one)}: these norms are stored without the 1 that the model adds, so "
            f"subtract 1 from all norms of the head"
        )
    return problems


def norms_near_one(store: TensorStore) -> list[str]:
    """Input norms that betray a baked-in 1, with their means; only if all of the head's do."""
    names = [n for n in store.names if n.startswith(HEAD_PREFIX) and n.endswith(INPUT_NORM)]
    found = []
    for name in names:
        info = store.info(name)
        if info.dtype in FLOAT_DTYPES and 0 < info.nbytes < 2**20:
            mean = float(float_values(b"".join(store.chunks(name)), info.dtype).mean())
            if abs(mean - 1) < 0.25:
                found.append(f"{name} with mean {mean:.3f}")
    return found if len(found) == len(names) else []


def is_fp8_block(store: TensorStore) -> bool:
    """Whether the head's matrices are FP8 in blocks."""
    return any(n.startswith(HEAD_PREFIX) and n.endswith(FP8_BLOCK_SCALE) for n in store.names)
