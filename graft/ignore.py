"""modelopt's exclusion list: derived from the tensors' dtypes, judged as vLLM judges it.

vLLM's rules (0.32.0, `ModelOptQuantConfigBase.is_layer_excluded`), in order: exact names, where a
fused module takes the verdict of its members and they must agree; for experts, any entry that
contains the experts' prefix; any entry that is a substring of the prefix; `fnmatch`. Before that,
for the target model only, `X*` becomes `X` and `X.*`, and names are mapped to vLLM's. A list that
looks right can therefore exclude too much, so every entry is tried on every module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from graft.errors import UserError
from graft.index import TensorInfo
from graft.reader import HEAD_PREFIX

UNQUANTIZED_DTYPES = ("BF16", "F16", "F32")
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
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\b.*")
_WEIGHT = re.compile(r"(.+)\.(weight|weight_packed)")


@dataclass(frozen=True, kw_only=True)
class LinearModule:
    """One linear or expert module as vLLM builds it.

    `members` are its parts on disk (q, k and v of a fused qkv), `prefix` its name inside vLLM.
    """

    prefix: str
    members: tuple[str, ...]
    quantized: bool
    is_head: bool


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether vLLM builds the class with a vision tower, which spells module names differently."""
    return any("ForConditionalGeneration" in name for name in config.get("architectures") or [])


def map_name(name: str, multimodal: bool) -> str:
    """A checkpoint name as the target model in vLLM spells it (first matching prefix)."""
    for old, new in (MULTIMODAL_MAP if multimodal else TEXT_ONLY_MAP).items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def map_entries(entries: Iterable[str], multimodal: bool) -> list[str]:
    """An exclusion list as the target model in vLLM sees it."""
    split: list[str] = []
    for entry in entries:
        if len(entry) >= 2 and entry[-1] == "*" and entry[-2] != ".":
            split += [entry[:-1], entry[:-1] + ".*"]
        else:
            split.append(entry)
    return [map_name(entry, multimodal) for entry in split]


def is_excluded(prefix: str, entries: list[str], fused: dict[str, list[str]]) -> bool:
    """vLLM's verdict on one module.

    Raises:
        ValueError: when an exact match covers some members of a fused module and not others.
    """
    last = prefix.rpartition(".")[2]
    if last in fused and prefix not in entries:
        verdicts = {prefix.replace(last, member) in entries for member in fused[last]}
        if len(verdicts) > 1:
            raise ValueError(f"some but not all members of {prefix} are excluded")
        exact = verdicts.pop()
    elif last not in fused and "experts" in prefix:
        exact = any(prefix in entry for entry in entries if "experts" in entry)
    else:
        exact = prefix in entries
    return exact or any(
        (entry != prefix and entry in prefix) or fnmatch(prefix, entry) for entry in entries
    )


def linear_modules(tensors: Iterable[TensorInfo], multimodal: bool) -> list[LinearModule]:
    """Group tensors into the modules that vLLM builds, quantized or not by their dtypes.

    Raises:
        UserError: for a fused module of which only some members are quantized.
    """
    quantized_by_name: dict[str, bool] = {}
    for info in tensors:
        if info.name.endswith("embed_tokens.weight"):
            continue
        experts, weight = _EXPERTS.fullmatch(info.name), _WEIGHT.fullmatch(info.name)
        if experts and not info.name.endswith(("_scale", "_scale_2", "_scale_inv")):
            name = experts[1]
        elif weight and len(info.shape) > 1:
            name = weight[1]
        else:
            continue
        quantized = info.dtype not in UNQUANTIZED_DTYPES
        quantized_by_name[name] = quantized_by_name.get(name, False) or quantized
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in quantized_by_name:
        is_head = name.startswith(HEAD_PREFIX)
        spelled = name if is_head else map_name(name, multimodal)
        groups.setdefault((_fused_name(spelled, is_head), is_head), []).append(name)
    modules = []
    for (prefix, is_head), members in groups.items():
        verdicts = {quantized_by_name[member] for member in members}
        if len(verdicts) > 1:
            raise UserError(
                f"one precision for all of {', '.join(members)}, which vLLM fuses",
                "some quantized and some not",
                "quantize all of them or none",
            )
        modules.append(
            LinearModule(
                prefix=prefix, members=tuple(members), quantized=verdicts.pop(), is_head=is_head
            )
        )
    return modules


def _fused_name(name: str, is_head: bool) -> str:
    parent, _, last = name.rpartition(".")
    for fused, members in (DRAFT_FUSED if is_head else TARGET_FUSED).items():
        if last in members:
            return f"{parent}.{fused}"
    return name


def wrong_modules(
    modules: Iterable[LinearModule], entries: list[str], multimodal: bool
) -> list[str]:
    """Modules that vLLM would load in another precision than they are stored in."""
    mapped = map_entries(entries, multimodal)
    wrong = []
    for module in modules:
        try:
            excluded = _excludes(module, entries, mapped)
        except ValueError as error:
            wrong.append(str(error))
            continue
        if excluded == module.quantized:
            wrong.append(f"{module.prefix} would be {'un' if excluded else ''}quantized")
    return wrong


def derive_ignore(
    modules: Iterable[LinearModule], existing: Iterable[str], multimodal: bool
) -> list[str]:
    """The exclusion list for these modules: what exists, corrected, and as few entries as do.

    Args:
        modules: all modules of base and head (`linear_modules`).
        existing: the base's list; entries that hit a quantized module are dropped.
        multimodal: whether vLLM builds the multimodal class, which maps names.

    Raises:
        UserError: when no list can express these tensors.
    """
    modules = list(modules)
    quantized = [module for module in modules if module.quantized]

    def is_safe(entry: str) -> bool:
        mapped = map_entries([entry], multimodal)
        return not any(_hits(module, [entry], mapped) for module in quantized)

    entries = [entry for entry in dict.fromkeys(existing) if is_safe(entry)]
    candidates = [entry for entry in _coarse_entries(modules) if is_safe(entry)]
    for entry in candidates:
        if _open(modules, entries, multimodal) - _open(modules, [*entries, entry], multimodal):
            entries.append(entry)
    still_open = _open(modules, entries, multimodal)
    entries += [name for module in modules if module in still_open for name in module.members]
    if not any("lm_head" in module.members for module in modules) and "lm_head" not in entries:
        entries.append("lm_head")  # tied: vLLM still builds one, and would quantize it
    if wrong := wrong_modules(modules, entries, multimodal):
        raise UserError(
            "an exclusion list that gives every module its stored precision in vLLM",
            f"{len(wrong)} that no list can express: {'; '.join(wrong[:5])}",
            "graft the BF16 form of the head",
        )
    return entries


def _coarse_entries(modules: list[LinearModule]) -> list[str]:
    """Candidates from coarse to fine: whole stacks, then parts of all layers."""
    parts = ("self_attn*", "linear_attn*", "mlp.gate", "mlp.shared_expert*", "mlp.experts*")
    stacks = {
        name[: found.end()]
        for module in modules
        for name in module.members
        if (found := re.match(r"(mtp|model|model\.language_model)\.layers\.", name))
    }
    whole = [f"{stack[:-1]}*" for stack in sorted(stacks)]
    fine = [f"{stack}*.{part}" for stack in sorted(stacks) for part in parts]
    return ["mtp*", "model.visual*", "lm_head", "mtp.fc", *whole, *fine]


def _open(modules: list[LinearModule], entries: list[str], multimodal: bool) -> set[LinearModule]:
    """Unquantized modules that `entries` do not exclude yet."""
    mapped = map_entries(entries, multimodal)
    return {m for m in modules if not m.quantized and not _hits(m, entries, mapped)}


def _hits(module: LinearModule, entries: list[str], mapped: list[str]) -> bool:
    try:
        return _excludes(module, entries, mapped)
    except ValueError:
        return module.quantized  # half a fused module: drop the entry, or list all its members


def _excludes(module: LinearModule, entries: list[str], mapped: list[str]) -> bool:
    if module.is_head:
        return is_excluded(module.prefix, entries, DRAFT_FUSED)
    return is_excluded(module.prefix, mapped, TARGET_FUSED)
