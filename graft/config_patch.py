"""Edits of config.json and hf_quant_config.json. Nothing is removed, both lists stay identical."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from graft.formats import NVFP4_BLOCK
from graft.layout import count_key, declared_layers

# Lists of a text config that may happen to be as long as there are layers.
NOT_PER_LAYER = ("architectures", "eos_token_id", "mlp_only_layers")

FP8_KEYS = ("ignored_layers", "modules_to_not_convert")


def with_layer_count(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config with the number of MTP layers where the family keeps it.

    A list with one entry for each layer of the trunk and each MTP layer that was declared gets as
    many MTP entries as there are now, all like the last one (a Step-3.7 export truncated its own).
    """
    patched = copy.deepcopy(dict(config))
    key = count_key(config)
    nested = patched.get("text_config")
    text = nested if isinstance(nested, dict) else patched
    num_trunk, declared = text.get("num_hidden_layers") or 0, declared_layers(config) or 0
    for name, value in text.items():
        counts_heads = isinstance(value, list) and len(value) == num_trunk + declared
        if counts_heads and declared and name not in NOT_PER_LAYER:
            text[name] = value[:num_trunk] + value[-1:] * num_layers
    if isinstance(nested, dict):
        nested[key] = num_layers
    if not isinstance(nested, dict) or key in patched:
        patched[key] = num_layers
    return patched


def nvfp4_blocks(
    algo: str, ignore: list[str], producer: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """modelopt's two NVFP4 blocks: for config.json, and the whole of hf_quant_config.json.

    Args:
        algo: "NVFP4", or "W4A16_NVFP4" for weights without input scales.
        ignore: the exclusion list of both.
        producer: who quantized, as modelopt notes it.
    """
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    block = {
        "quant_method": "modelopt",
        "quant_algo": algo,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers,
                "input_activations": dict(numbers) if algo == "NVFP4" else None,
            }
        },
        "ignore": list(ignore),
        "producer": dict(producer),
    }
    file = {
        "producer": dict(producer),
        "quantization": {
            "quant_algo": algo,
            "kv_cache_quant_algo": None,
            "group_size": NVFP4_BLOCK,
            "exclude_modules": list(ignore),
        },
    }
    return block, file


def with_ignore(
    block: Mapping[str, Any] | None, file: Mapping[str, Any] | None, ignore: list[str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The base's own blocks with another exclusion list, each where it exists."""
    new_block = None
    if block:
        keys = ["ignore"]
        if block.get("quant_method") == "fp8":
            keys = [key for key in FP8_KEYS if key in block] or ["modules_to_not_convert"]
        new_block = {**block, **{key: list(ignore) for key in keys}}
    new_file = None
    if file:
        inner = {**file.get("quantization", {}), "exclude_modules": list(ignore)}
        new_file = {**file, "quantization": inner}
    return new_block, new_file


def with_expert_algos(block: Mapping[str, Any], num_layers: int, algo: str | None) -> Any:
    """One of modelopt's blocks for a mixture, with its head's experts at `algo`, or none of them.

    Args:
        block: what holds `quantized_layers`; returned as it is where it holds none.
        num_layers: MTP layers.
        algo: "NVFP4" or "W4A16_NVFP4"; None for an unquantized head.
    """
    if "quantized_layers" not in block:
        return block
    layers = {
        name: settings
        for name, settings in block["quantized_layers"].items()
        if name != "mtp" and not name.startswith("mtp.")  # the old head's
    }
    if algo is not None:
        # An entry of their own: without one vLLM gives experts the algorithm of a sibling.
        settings = {"quant_algo": algo, "group_size": NVFP4_BLOCK}
        layers |= {f"mtp.layers.{n}.mlp.experts": dict(settings) for n in range(num_layers)}
    return {**block, "quantized_layers": layers}


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Say in words where two JSON values differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in sorted(old.keys() | new.keys()):
            where = f"{path}.{key}" if path else key
            if key not in old:
                found.append(f"{where}: added {new[key]!r}")
            elif key not in new:
                found.append(f"{where}: removed")
            else:
                found += differences(old[key], new[key], where)
        return found
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]
