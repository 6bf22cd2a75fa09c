"""Kinds of the config values that are read here, checked once, where the files are opened.

A config that is JSON can still hold a number where a list belongs. Checked in one place, that is
one clear error, and everything behind it may trust what it reads. Keys that nobody reads may hold
anything. null counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft.errors import UserError

Kind = type | str
STRINGS, COUNT, LAYERS, GROUPS = "a list of strings", "a count", "layers", "groups"
CONFIG_KINDS: dict[str, Kind] = {
    "model_type": str, "architectures": STRINGS, "text_config": dict, "vision_config": dict,
    "quantization_config": dict, "rope_parameters": dict, "layer_types": STRINGS,
    "mlp_only_layers": list, "num_hidden_layers": COUNT, "mtp_num_hidden_layers": COUNT,
    "num_nextn_predict_layers": COUNT, "decoder_sparse_step": COUNT, "num_experts": COUNT,
    "tie_word_embeddings": bool, "attn_output_gate": bool,
}  # fmt: skip
QUANTIZATION_KINDS: dict[str, Kind] = {
    "quant_method": str, "quant_algo": str, "format": str, "ignore": STRINGS,
    "exclude_modules": STRINGS, "ignored_layers": STRINGS, "modules_to_not_convert": STRINGS,
    "quantized_layers": LAYERS, "config_groups": GROUPS, "weight_block_size": list,
    "producer": dict,
}  # fmt: skip
GROUP_KINDS: dict[str, Kind] = {
    "targets": STRINGS, "weights": dict, "input_activations": dict, "format": str,
}  # fmt: skip


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config.json, or its text part, that holds values of another kind.

    Raises:
        UserError: naming file, key and value.
    """
    _check(config, CONFIG_KINDS, path)


def check_quantization(block: Mapping[str, Any] | None, path: Path) -> None:
    """The same for a quantization block, of either file."""
    _check(block or {}, QUANTIZATION_KINDS, path)


def _check(values: Mapping[str, Any], kinds: Mapping[str, Kind], path: Path) -> None:
    for key, kind in kinds.items():
        value = values.get(key)
        if value is not None and not _is_of(value, kind):
            raise UserError(
                f"a {key} of the kind that transformers and the quantizers write in {path}",
                ascii(value)[:80],
                "restore that file",
            )


def _is_of(value: Any, kind: Kind) -> bool:
    if isinstance(kind, type):
        return isinstance(value, kind)
    if kind == COUNT:
        return type(value) is int and value >= 0
    if kind == STRINGS:
        return isinstance(value, list) and all(map(_is_entry, value))
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        return False
    if kind == LAYERS:
        return all(isinstance(item.get("quant_algo"), str) for item in value.values())
    return all(
        item.get(key) is None or _is_of(item[key], inner)
        for item in value.values()
        for key, inner in GROUP_KINDS.items()
    )


def _is_entry(value: Any) -> bool:
    """A string; `re:` must be followed by a pattern."""
    if not isinstance(value, str):
        return False
    try:
        re.compile(value.removeprefix("re:") if value.startswith("re:") else "")
    except (re.error, RecursionError, OverflowError):
        return False
    return True
