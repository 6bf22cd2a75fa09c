"""What vLLM makes of each module under a quantization config: its matching rules, rebuilt.

One class a config that vLLM has (0.32.0, `vllm/model_executor/layers/quantization`). The rules were
read there and are held against vLLM's own functions on generated names and lists in
`tests/vllm/test_matching.py`. The draft model shares the target's config object, so it sees lists
whose entries were already respelled for the target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from typing import Any, Self

from graft.modules import (
    CT_NVFP4,
    CT_NVFP4_W4A16,
    DRAFT_FUSED,
    FP8,
    FP8_BLOCK,
    NVFP4,
    NVFP4_W4A16,
    TARGET_FUSED,
    UNQUANTIZED,
    LinearModule,
    map_name,
)

ENGINE = "vLLM 0.32.0"
"""Whose rules these are. Other engines read the same lists otherwise (sglang#38870, #36599)."""
NEVER_QUANTIZED = (".mlp.gate", ".shared_expert_gate", ".conv1d", ".patch_embed.proj")
"""Modules that vLLM builds without a quantization config, whatever the lists say."""
ALGO_LAYOUTS = {
    "NVFP4": frozenset({NVFP4}),
    "W4A16_NVFP4": frozenset({NVFP4, NVFP4_W4A16}),  # an input scale is read and dropped
    "FP8": frozenset({FP8}),
}
_CLASSES = {"lm_head": "ParallelLMHead", "experts": "RoutedExperts"}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The exclusion list of a checkpoint and vLLM's way to read it."""

    entries: tuple[str, ...]
    multimodal: bool

    def with_entries(self, entries: Iterable[str]) -> Self:
        """The same rules with another list."""
        return replace(self, entries=tuple(entries))

    def excludes(self, module: LinearModule) -> bool:
        """Whether the list excludes a module.

        Raises:
            ValueError: when it covers some members of a fused module and not others.
        """
        raise NotImplementedError

    def layouts(self, module: LinearModule) -> frozenset[str] | None:
        """The layouts that vLLM can load if the list does not exclude `module`; None: any."""
        raise NotImplementedError

    def resolved(self, module: LinearModule) -> frozenset[str] | None:
        """The layouts that the config gives a module; None: any. ValueError as for `excludes`."""
        return frozenset({UNQUANTIZED}) if self.excludes(module) else self.layouts(module)

    def expected(self, module: LinearModule) -> frozenset[str] | None:
        """The layouts that vLLM can load into a module; ValueError as for `excludes`."""
        if not module.is_head and module.prefix.endswith(NEVER_QUANTIZED):
            return frozenset({UNQUANTIZED})
        return self.resolved(module)

    def readings(self) -> list[Self]:
        """Every way in which an engine may read the list; a derived list must be right in all."""
        return [self]

    def fused(self, module: LinearModule) -> dict[str, list[str]]:
        """The fused names of the model that builds `module`."""
        return DRAFT_FUSED if module.is_head else TARGET_FUSED


@dataclass(frozen=True, kw_only=True)
class ModeloptRules(Rules):
    """`ModelOptQuantConfigBase`: exact, experts by containment, substring, `fnmatch`."""

    quantized: frozenset[str]
    respelled_for_draft: bool = True

    @cached_property
    def mapped(self) -> list[str]:
        """The list as the models in vLLM see it."""
        return map_entries(self.entries, self.multimodal)

    def readings(self) -> list[Self]:
        """As vLLM reads it, and as it would if it loaded the draft model alone."""
        return [self, replace(self, respelled_for_draft=False)]

    def excludes(self, module: LinearModule) -> bool:
        """See `Rules.excludes`."""
        as_written = module.is_head and not self.respelled_for_draft
        entries = list(self.entries) if as_written else self.mapped
        return is_excluded(module.prefix, entries, self.fused(module))

    def layouts(self, module: LinearModule) -> frozenset[str] | None:
        """See `Rules.layouts`."""
        return self.quantized


@dataclass(frozen=True, kw_only=True)
class MixedRules(ModeloptRules):
    """`ModelOptMixedPrecisionConfig`: modelopt's list first, then each module's own algorithm."""

    algos: Mapping[str, str]
    """Module name or ancestor, as vLLM spells it, to algorithm: see `mixed_algos`."""

    def layouts(self, module: LinearModule) -> frozenset[str] | None:
        """See `Rules.layouts`."""
        algo = resolve_mixed(module.prefix, self.algos, self.fused(module))
        if algo is None:
            return frozenset({UNQUANTIZED})
        return ALGO_LAYOUTS.get(algo)


@dataclass(frozen=True, kw_only=True)
class CompressedTensorsRules(Rules):
    """`CompressedTensorsConfig`: exact names and `re:`, then the group whose target matches."""

    targets: Mapping[str, bool]
    """Target of a config group to whether it quantizes activations too."""

    @cached_property
    def mapped(self) -> list[str]:
        """The list as the models in vLLM see it: only paths are respelled."""
        return [_map_path(entry, self.multimodal) for entry in self.entries]

    def excludes(self, module: LinearModule) -> bool:
        """See `Rules.excludes`."""
        verdicts = {is_ignored(name, self.mapped, self.fused(module)) for name in _ct_names(module)}
        if len(verdicts) > 1:
            raise ValueError(f"gate, up and down of {module.prefix} are not ignored alike")
        return verdicts.pop()

    def layouts(self, module: LinearModule) -> frozenset[str] | None:
        """See `Rules.layouts`."""
        return self.with_entries([]).resolved(module)

    def resolved(self, module: LinearModule) -> frozenset[str] | None:
        """See `Rules.resolved`; all projections of a layer's experts must come to the same."""
        targets = {_map_path(target, self.multimodal): a for target, a in self.targets.items()}
        if "Linear" in targets:  # vLLM lets it match routed experts as well
            targets.setdefault("RoutedExperts", targets["Linear"])
        kind = _CLASSES.get(module.prefix.rpartition(".")[2], "ParallelLinear")
        found = set()
        for name in _ct_names(module):
            ignored = is_ignored(name, self.mapped, self.fused(module))
            target = None if ignored else match_target(name, kind, targets, self.fused(module))
            found.add(None if target is None else targets[target])
        if len(found) > 1:
            raise ValueError(f"gate, up and down of {module.prefix} are not quantized alike")
        activations = found.pop()
        if activations is None:
            return frozenset({UNQUANTIZED})
        return frozenset({CT_NVFP4 if activations else CT_NVFP4_W4A16})


@dataclass(frozen=True, kw_only=True)
class Fp8Rules(Rules):
    """`Fp8Config`: exact names, experts by containment; an output matrix is never quantized."""

    @cached_property
    def mapped(self) -> list[str]:
        """The list as the models in vLLM see it."""
        return [map_name(entry, self.multimodal) for entry in self.entries]

    def excludes(self, module: LinearModule) -> bool:
        """See `Rules.excludes`."""
        return is_skipped(module.prefix, self.mapped, self.fused(module))

    def layouts(self, module: LinearModule) -> frozenset[str] | None:
        """See `Rules.layouts`."""
        is_output = module.prefix.endswith("lm_head")
        return frozenset({UNQUANTIZED if is_output else FP8_BLOCK})


def map_entries(entries: Iterable[str], multimodal: bool) -> list[str]:
    """modelopt's list as the target model in vLLM sees it: `X*` becomes `X` and `X.*`."""
    split: list[str] = []
    for entry in entries:
        if len(entry) >= 2 and entry[-1] == "*" and entry[-2] != ".":
            split += [entry[:-1], entry[:-1] + ".*"]
        else:
            split.append(entry)
    return [map_name(entry, multimodal) for entry in split]


def is_skipped(prefix: str, entries: list[str], fused: Mapping[str, list[str]]) -> bool:
    """`is_layer_skipped`: exact names; experts also where an entry contains their prefix.

    Raises:
        ValueError: when an exact match covers some members of a fused module and not others.
    """
    last = prefix.rpartition(".")[2]
    if last in fused and prefix not in entries:
        verdicts = {prefix.replace(last, member) in entries for member in fused[last]}
        if len(verdicts) > 1:
            raise ValueError(f"some but not all members of {prefix} are excluded")
        return verdicts.pop()
    if last not in fused and "experts" in prefix:
        return any(prefix in entry for entry in entries if "experts" in entry)
    return prefix in entries


def is_excluded(prefix: str, entries: list[str], fused: Mapping[str, list[str]]) -> bool:
    """`is_layer_excluded` of modelopt: `is_skipped`, then substring, then `fnmatch`.

    Raises:
        ValueError: as `is_skipped`.
    """
    return is_skipped(prefix, entries, fused) or any(
        (entry != prefix and entry in prefix) or matches(prefix, entry) for entry in entries
    )


def matches(prefix: str, entry: str) -> bool:
    """`fnmatch`, which translates every pattern anew once there are more than it remembers."""
    has_wildcard = "*" in entry or "?" in entry or "[" in entry
    return fnmatch(prefix, entry) if has_wildcard else prefix == entry


def mixed_algos(quantized_layers: Mapping[str, Any], multimodal: bool) -> dict[str, str]:
    """Each quantized layer and, with a dot at the end, each ancestor -> algorithm.

    vLLM scans all keys for the first below a prefix; with 124,468 keys that is done once here.
    """
    algos: dict[str, str] = {}
    for key, settings in quantized_layers.items():
        name, algo = map_name(key, multimodal), str(settings["quant_algo"]).upper()
        algos[name] = algo
        while "." in name:
            name = name.rpartition(".")[0]
            algos.setdefault(f"{name}.", algo)
    return algos


def resolve_mixed(
    prefix: str, algos: Mapping[str, str], fused: Mapping[str, list[str]]
) -> str | None:
    """`_resolve_quant_algo`: the module, its fused members, anything below it, its siblings.

    Raises:
        ValueError: when the members of a fused module have different algorithms.
    """
    spellings = _mixed_spellings(prefix)
    for name in spellings:
        if name in algos:
            return algos[name]
    parent, _, last = prefix.rpartition(".")
    if last in fused:
        found = {
            algos[f"{base}.{member}"]
            for base in _mixed_spellings(parent)
            for member in fused[last]
            if f"{base}.{member}" in algos
        }
        if len(found) > 1:
            raise ValueError(f"the members of {prefix} have different algorithms")
        if found:
            return found.pop()
    for name in spellings:
        if f"{name}." in algos:
            return algos[f"{name}."]
    # Experts without an entry of their own take that of any sibling, such as the shared expert.
    return algos.get(f"{parent}.") if last == "experts" else None


def _mixed_spellings(prefix: str) -> list[str]:
    inside, outside = "language_model.model.", "model.language_model."
    spellings = [prefix]
    if prefix.endswith(".lm_head"):
        spellings.append("lm_head")
    if prefix.startswith(inside):
        spellings.append(outside + prefix.removeprefix(inside))
    elif prefix.startswith(outside):
        spellings.append(inside + prefix.removeprefix(outside))
    return spellings


def is_ignored(name: str, entries: list[str], fused: Mapping[str, list[str]]) -> bool:
    """`should_ignore_layer` of compressed-tensors: the name itself, or all fused members.

    Raises:
        ValueError: when some members of a fused module are ignored and others not.
    """
    if any(_equal_or_regex(name, entry) for entry in entries):
        return True
    last = name.rpartition(".")[2]
    if last not in fused:
        return False
    verdicts = {
        any(_equal_or_regex(name.replace(last, member), entry) for entry in entries)
        for member in fused[last]
    }
    if len(verdicts) > 1:
        raise ValueError(f"some but not all members of {name} are ignored")
    return verdicts.pop()


def match_target(
    name: str, kind: str, targets: Iterable[str], fused: Mapping[str, list[str]]
) -> str | None:
    """`find_matched_target` of compressed-tensors: the name, all fused members, then the class."""
    targets = list(targets)
    for target in targets:
        if _equal_or_regex(name, target):
            return target
    last = next((key for key in fused if name.endswith(key)), None)
    if last is not None:
        members = [
            next((t for t in targets if _equal_or_regex(name.replace(last, member), t)), None)
            for member in fused[last]
        ]
        if all(members):
            return members[0]
    for target in targets:
        is_regex = target.startswith("re:")
        if _equal_or_regex(kind, target) if is_regex else target.lower() in kind.lower():
            return target
    return None


def _equal_or_regex(name: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return entry == name


def _ct_names(module: LinearModule) -> list[str]:
    """The names by which vLLM asks; the first expert decides for all."""
    if module.is_experts:
        return [f"{module.prefix}.0.{part}_proj" for part in ("gate", "up", "down")]
    return [module.prefix]


def _map_path(entry: str, multimodal: bool) -> str:
    is_path = "." in entry and not entry.startswith("re:")
    return map_name(entry, multimodal) if is_path else entry
