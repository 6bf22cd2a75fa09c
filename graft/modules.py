"""The linear and expert modules of a checkpoint, as vLLM builds them, and how each is stored.

A quantization config only speaks about modules; what is on disk shows in tensor names and dtypes.
Configs are wrong often enough (a key renamed, a list not updated) that the tensors decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graft.errors import UserError
from graft.index import TensorInfo
from graft.reader import HEAD_PREFIX

UNQUANTIZED_DTYPES = ("BF16", "F16", "F32")
UNQUANTIZED = "unquantized"
NVFP4 = "modelopt NVFP4"
NVFP4_W4A16 = "modelopt NVFP4 without input scales"
CT_NVFP4 = "compressed-tensors NVFP4"
CT_NVFP4_W4A16 = "compressed-tensors NVFP4 without input scales"
FP8_BLOCK = "FP8 block"
FP8 = "FP8 with a scale a tensor or channel"
# Stored layout, the part that holds the weight, its dtype, and what lies beside it; first match.
LAYOUTS: tuple[tuple[str, str, str, frozenset[str]], ...] = (
    (NVFP4, "weight", "U8", frozenset({"weight_scale", "weight_scale_2", "input_scale"})),
    (NVFP4_W4A16, "weight", "U8", frozenset({"weight_scale", "weight_scale_2"})),
    (CT_NVFP4, "weight_packed", "U8",
     frozenset({"weight_scale", "weight_global_scale", "input_global_scale"})),
    (CT_NVFP4_W4A16, "weight_packed", "U8", frozenset({"weight_scale", "weight_global_scale"})),
    (FP8_BLOCK, "weight", "F8_E4M3", frozenset({"weight_scale_inv"})),
    (FP8, "weight", "F8_E4M3", frozenset({"weight_scale"})),
    ("pack-quantized integers", "weight_packed", "I32", frozenset({"weight_scale"})),
    ("AWQ or GPTQ", "qweight", "I32", frozenset({"scales"})),
    ("INT8", "weight", "I8", frozenset({"weight_scale"})),
    ("bitsandbytes", "weight", "U8", frozenset({"quant_map"})),
)  # fmt: skip
WITHOUT_INPUT_SCALES = {NVFP4: NVFP4_W4A16, CT_NVFP4: CT_NVFP4_W4A16}
DRAFT_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
TARGET_FUSED = {
    **DRAFT_FUSED,
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "in_proj_ba": ["in_proj_b", "in_proj_a"],
}
MULTIMODAL_MAP = {
    "model.visual.": "visual.",
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
}
TEXT_ONLY_MAP = {"model.language_model.": "model."}
_HOLDERS = (
    "weight", "weight_packed", "qweight",
    "stacked", "stacked_packed", "stacked_weight", "stacked_weight_packed", "stacked_blocks",
)  # fmt: skip
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+\.\w+)\.(\w+)")
_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(.*)")


@dataclass(frozen=True, kw_only=True)
class LinearModule:
    """One linear or expert module as vLLM builds it.

    `members` are its parts on disk (q, k and v of a fused qkv), `prefix` its name inside vLLM,
    `stored` a layout of `LAYOUTS` or `UNQUANTIZED`, `is_head` whether the draft model builds it.
    """

    prefix: str
    members: tuple[str, ...]
    stored: str
    is_head: bool

    @property
    def quantized(self) -> bool:
        """Whether it is stored in anything but a plain floating-point dtype."""
        return self.stored != UNQUANTIZED

    @property
    def is_experts(self) -> bool:
        """Whether it is a layer's routed experts, which vLLM loads as one module."""
        return self.prefix.endswith(".experts")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether vLLM builds the class with a vision tower, which spells module names differently."""
    return any("ForConditionalGeneration" in name for name in config.get("architectures") or [])


def map_name(name: str, multimodal: bool) -> str:
    """A checkpoint name as the target model in vLLM spells it (first matching prefix)."""
    for old, new in (MULTIMODAL_MAP if multimodal else TEXT_ONLY_MAP).items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def linear_modules(tensors: Iterable[TensorInfo], multimodal: bool) -> list[LinearModule]:
    """Group tensors into the modules that vLLM builds, each with its stored layout.

    Raises:
        UserError: for a fused module, or experts, of which not all are stored alike.
    """
    stored: dict[str, str] = {}
    for name, layouts in _layouts_by_name(tensors).items():
        stored[name] = _one_layout([name], layouts)
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in stored:
        is_head = name.startswith(HEAD_PREFIX)
        spelled = name if is_head else map_name(f"{name}.", multimodal)[:-1]
        groups.setdefault((_fused_name(spelled, is_head), is_head), []).append(name)
    modules = [
        LinearModule(
            prefix=prefix,
            members=tuple(members),
            stored=_one_layout(members, {stored[member] for member in members}),
            is_head=is_head,
        )
        for (prefix, is_head), members in groups.items()
    ]
    if "lm_head" in stored and any(module.is_head for module in modules):
        # The draft model builds an output matrix of its own, under the unmapped name.
        modules.append(
            LinearModule(
                prefix="lm_head", members=("lm_head",), stored=stored["lm_head"], is_head=True
            )
        )
    return modules


def _layouts_by_name(tensors: Iterable[TensorInfo]) -> dict[str, set[str]]:
    """The layouts found in each module on disk; a layer's experts are one module."""
    units: dict[tuple[str, str], dict[str, TensorInfo]] = {}
    for info in tensors:
        if info.name.endswith("embed_tokens.weight"):
            continue
        if found := _EXPERT.fullmatch(info.name):
            module, unit, part = found.groups()
        elif found := _FUSED_EXPERTS.fullmatch(info.name):
            module, unit, part = found[1], found[2], f"stacked{found[3].replace('.', '_')}"
        else:
            module, _, part = info.name.rpartition(".")
            unit = ""
        units.setdefault((module, unit), {})[part] = info
    layouts: dict[str, set[str]] = {}
    for (module, _), parts in units.items():
        if layout := _stored_layout(parts):
            layouts.setdefault(module, set()).add(layout)
    return layouts


def _stored_layout(parts: Mapping[str, TensorInfo]) -> str | None:
    """The layout of one matrix from its parts, or None for what is no linear module."""
    holder = next((part for part in _HOLDERS if part in parts), None)
    if holder is None or len(parts[holder].shape) < 2:
        return None
    info = parts[holder]
    plain = holder == "weight" or (holder == "stacked" and len(info.shape) == 3)
    if plain and info.dtype in UNQUANTIZED_DTYPES:
        return UNQUANTIZED
    for layout, part, dtype, beside in LAYOUTS:
        if (part, dtype) == (holder, info.dtype) and beside <= parts.keys():
            return layout
    others = ", ".join(sorted(parts.keys() - {holder})) or "nothing"
    shape = "stacked experts" if holder.startswith("stacked") else "a matrix"
    return f"{shape} of {info.dtype} {len(info.shape)}-D ({info.name.rpartition('.')[2]}, {others})"


def _one_layout(members: list[str], layouts: set[str]) -> str:
    if len(layouts) == 2:
        for whole, part in WITHOUT_INPUT_SCALES.items():
            if layouts == {whole, part}:
                return part  # an input scale that is missing anywhere is missing
    if len(layouts) > 1:
        raise UserError(
            f"one precision for all of {', '.join(members)}, which vLLM fuses",
            f"some quantized and some not, or differently: {', '.join(sorted(layouts))}",
            "quantize all of them alike or none",
        )
    return next(iter(layouts))


def _fused_name(name: str, is_head: bool) -> str:
    parent, _, last = name.rpartition(".")
    for fused, members in (DRAFT_FUSED if is_head else TARGET_FUSED).items():
        if last in members:
            return f"{parent}.{fused}"
    return name
