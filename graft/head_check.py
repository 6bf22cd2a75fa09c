"""Is this head complete, well formed and finite? Asked before a graft and again after it.

vLLM's own check lists only norms on a BF16 base and is off on a quantized one, so a head with
missing experts or scales loads silently and drafts garbage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graft.formats import Form, head_tensors
from graft.reader import HEAD_PREFIX, TensorStore
from graft.values import FLOAT_DTYPES, float_values


def shape_problems(
    store: TensorStore, text_config: Mapping[str, Any], num_layers: int, form: Form
) -> list[str]:
    """Missing, unexpected and misshapen head tensors, all of them, from headers alone."""
    wanted = head_tensors(text_config, num_layers, form)
    present = [name for name in store.names if name.startswith(HEAD_PREFIX)]
    problems = [f"{name} is missing" for name in wanted.keys() - set(present)]
    for name in present:
        if name not in wanted:
            problems.append(f"{name} does not belong to a {num_layers}-layer {form} head")
            continue
        dtype, shape = wanted[name]
        info = store.info(name)
        if (info.dtype, info.shape) != (dtype, shape):
            problems.append(f"{name} is {info.dtype} {list(info.shape)}, not {dtype} {list(shape)}")
    return sorted(problems)


def value_problems(store: TensorStore) -> list[str]:
    """Head tensors that are not finite, scales that are not positive, gate and up that differ."""
    problems = []
    for name in sorted(name for name in store.names if name.startswith(HEAD_PREFIX)):
        dtype = store.info(name).dtype
        if dtype not in FLOAT_DTYPES:
            continue
        positive = name.rpartition(".")[2] in ("weight_scale", "weight_scale_2", "input_scale")
        for chunk in store.chunks(name):
            values = float_values(chunk, dtype)
            if not np.isfinite(values).all():
                problems.append(f"{name} has values that are not finite")
                break
            if positive and not (values > 0).all():
                problems.append(f"{name} has a scale that is not above zero")
                break
        if name.endswith(".gate_proj.weight_scale_2"):
            partner = name.replace(".gate_proj.", ".up_proj.")
            if partner in store and store.digest(name) != store.digest(partner):
                problems.append(f"{name} differs from {partner}: vLLM uses one for both")
    return problems
