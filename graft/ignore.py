"""The exclusion list of a quantization config: derived from what is stored, judged as vLLM does.

A list that looks right can exclude too much (an entry is a substring of more names than meant) or
too little (a fused module covered by half), so every entry is tried on every module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from graft.errors import UserError
from graft.matching import CompressedTensorsRules, Fp8Rules, MixedRules, Rules
from graft.modules import UNQUANTIZED, LinearModule

_COMPRESSED_TENSORS = (
    "mtp.fc",
    "re:^mtp.*",
    r"re:^mtp\.layers\.\d+\.self_attn\..*",
    r"re:^mtp\.layers\.\d+\.mlp\.(gate|shared_expert_gate|shared_expert\..*)$",
    r"re:^mtp\.layers\.\d+\.mlp\.(gate|up|down)_proj$",
    r"re:^mtp\.layers\.\d+\.mlp\.experts\..*",
)
_PARTS = (
    "self_attn*", "linear_attn*", "mlp.gate", "mlp.shared_expert*", "mlp.shared_expert_gate",
    "mlp.experts*",
)  # fmt: skip


def wrong_modules(modules: Iterable[LinearModule], rules: Rules) -> list[str]:
    """Modules that vLLM would load in another precision than they are stored in."""
    wrong = []
    for module in modules:
        try:
            expected = rules.expected(module)
        except ValueError as error:
            wrong.append(str(error))
            continue
        fits = module.quantized if expected is None else module.stored in expected
        if not fits:
            wanted = " or ".join(sorted(expected or ["quantized"]))
            wrong.append(f"{module.prefix} is stored {module.stored}, vLLM would load {wanted}")
    return wrong


def derive_ignore(modules: Iterable[LinearModule], rules: Rules) -> list[str]:
    """The exclusion list for these modules: the base's, corrected, and as few new ones as do.

    Args:
        modules: all modules of base and head (`linear_modules`).
        rules: how vLLM reads this config, with the base's list; entries of it that hit a quantized
            module are dropped.

    Raises:
        UserError: when no list can express these tensors.
    """
    modules = list(modules)
    quantized = [module for module in modules if module.quantized]

    def is_safe(entry: str) -> bool:
        readings = rules.with_entries([entry]).readings()
        return not any(_hits(reading, module) for reading in readings for module in quantized)

    def closed_by(entries: Sequence[str], among: Iterable[LinearModule]) -> set[LinearModule]:
        readings = rules.with_entries(entries).readings()
        return {module for module in among if all(_hits(r, module) for r in readings)}

    entries = [entry for entry in dict.fromkeys(rules.entries) if is_safe(entry)]
    still_open = {module for module in modules if _must_be_listed(module, rules)}
    still_open -= closed_by(entries, still_open)
    for entry in _candidates(modules, rules):
        if is_safe(entry) and (closed := closed_by([entry], still_open)):
            entries.append(entry)
            still_open -= closed
    for module in modules:
        if module in still_open:
            entries += [name for name in _spelled_out(module, rules) if name not in entries]
    if not any("lm_head" in module.members for module in modules) and "lm_head" not in entries:
        entries.append("lm_head")  # tied: vLLM still builds one, and would quantize it
    for reading in rules.with_entries(entries).readings():
        if wrong := wrong_modules(modules, reading):
            raise UserError(
                "an exclusion list that gives every module its stored precision in vLLM",
                f"{len(wrong)} that no list can express: {'; '.join(wrong[:5])}",
                "graft the BF16 form of the head",
            )
    return entries


def _must_be_listed(module: LinearModule, rules: Rules) -> bool:
    """Unquantized modules that vLLM would quantize, and all of the head: other engines differ."""
    if module.quantized:
        return False
    try:
        return module.is_head or rules.with_entries([]).expected(module) != {UNQUANTIZED}
    except ValueError:
        return True


def _candidates(modules: list[LinearModule], rules: Rules) -> list[str]:
    """Entries worth trying, from coarse to fine: whole stacks, then parts of all layers."""
    if isinstance(rules, Fp8Rules):
        return []  # names only
    if isinstance(rules, CompressedTensorsRules):
        return list(_COMPRESSED_TENSORS)
    stacks = {
        name[: found.end()]
        for module in modules
        if not (isinstance(rules, MixedRules) and not module.is_head)
        for name in module.members
        if (found := re.match(r"(mtp|model|model\.language_model)\.layers\.", name))
    }
    whole = [f"{stack[:-1]}*" for stack in sorted(stacks)]
    fine = [f"{stack}*.{part}" for stack in sorted(stacks) for part in _PARTS]
    return ["mtp*", "model.visual*", "lm_head", "mtp.fc", *whole, *fine]


def _spelled_out(module: LinearModule, rules: Rules) -> tuple[str, ...]:
    if isinstance(rules, CompressedTensorsRules) and module.is_experts:
        return (f"re:^{re.escape(module.prefix)}\\..*",)
    return module.members


def _hits(rules: Rules, module: LinearModule) -> bool:
    try:
        return rules.excludes(module)
    except ValueError:
        return module.quantized  # half a fused module: drop the entry, or list all its members
