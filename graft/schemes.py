"""The quantizations that a base can state, one row each: what they say and what a head may be.

A row is found by what the config states, and must agree with what is stored: where config and
tensors differ, neither is believed. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graft.config_patch import FP8_KEYS
from graft.errors import UserError
from graft.formats import Form, quantization_blocks
from graft.ignore import wrong_modules
from graft.matching import (
    CompressedTensorsRules,
    Fp8Rules,
    MixedRules,
    ModeloptRules,
    Rules,
    mixed_algos,
)
from graft.modules import (
    CT_NVFP4,
    CT_NVFP4_W4A16,
    FP8,
    FP8_BLOCK,
    NVFP4,
    NVFP4_W4A16,
    UNQUANTIZED,
    LinearModule,
    is_multimodal,
    linear_modules,
)
from graft.reader import Checkpoint

Json = Mapping[str, Any]
CT_FORMAT = "nvfp4-pack-quantized"
FIRST_EXPERTS = LinearModule(
    prefix="mtp.layers.0.mlp.experts", members=(), stored=UNQUANTIZED, is_head=True
)


class UnknownQuantization(UserError):
    """A base whose quantization has no row here; nothing is known about its tensors."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One quantization: the layouts of its tensors, vLLM's rules, the form of an NVFP4 head."""

    name: str
    layouts: frozenset[str]
    rules: Callable[[Statement, bool], Rules]
    nvfp4_form: Callable[[Statement, Iterable[LinearModule], Form], Form]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What both config files say, read as vLLM reads them.

    `block` is config.json's `quantization_config`, `file` is hf_quant_config.json, `read` the one
    that vLLM goes by (the inner part of `file`), `name` the key into `SCHEMES`.
    """

    block: Json | None
    file: Json | None
    read: Json
    name: str

    @property
    def entries(self) -> tuple[str, ...]:
        """The exclusion list that vLLM reads."""
        keys: tuple[str, ...] = ("ignore",) if "quant_method" in self.read else ("exclude_modules",)
        if self.read.get("quant_method") == "fp8":
            keys = FP8_KEYS
        return tuple(next((self.read[key] for key in keys if self.read.get(key)), ()))

    @property
    def targets(self) -> dict[str, bool]:
        """compressed-tensors: each group's targets, and whether it quantizes activations."""
        return {
            target: bool(group.get("input_activations"))
            for group in self.read.get("config_groups", {}).values()
            for target in group.get("targets", [])
        }


def read_statement(checkpoint: Checkpoint) -> Statement:
    """Read both config files of a checkpoint.

    Raises:
        UserError: for compressed-tensors without config groups.
    """
    block, file = quantization_blocks(checkpoint)
    block, inner = block or None, (file or {}).get("quantization") or None
    # vLLM reads config.json; the file only without it, or where only it knows a mixture's layers.
    mixed = block is not None and str(block.get("quant_algo")).upper() == "MIXED_PRECISION"
    read = inner if block is None or (mixed and "quantized_layers" not in block) else block
    return Statement(block=block, file=file, read=read or {}, name=_stated_name(block, inner))


def _stated_name(block: Json | None, inner: Json | None) -> str:
    if block is None and inner is None:
        return "none"
    stated: Json = block if block is not None else {"quant_method": "modelopt"}
    method = str(stated.get("quant_method") or "a block without quant_method").lower()
    if method.startswith("modelopt"):
        algo = str(stated.get("quant_algo") or (inner or {}).get("quant_algo")).upper()
        groups = stated.get("config_groups")
        plain = groups and all(g.get("input_activations") is None for g in groups.values())
        return f"modelopt {'W4A16_NVFP4' if algo == 'NVFP4' and plain else algo}"
    if method == "compressed-tensors":
        return f"compressed-tensors {_ct_kind(stated)}"
    if method == "fp8":
        return "fp8 block" if stated.get("weight_block_size") else "fp8 with a scale a tensor"
    return f"{method} {stated.get('bits', '')}".strip()


def _ct_kind(block: Json) -> str:
    groups = block.get("config_groups") or {}
    if not groups:
        return "without config_groups"
    kinds = {_ct_group_kind(group, block.get("format")) for group in groups.values()}
    return kinds.pop() if len(kinds) == 1 else f"mixed ({', '.join(sorted(kinds))})"


def _ct_group_kind(group: Json, default: Any) -> str:
    stored = str(group.get("format") or default)
    wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    for part in (group.get("weights") or {}, group.get("input_activations") or wanted):
        if any(part.get(key) != value for key, value in wanted.items()):
            what = f"{part.get('num_bits')}-bit {part.get('type')}"
            return f"{stored} of {what} a {part.get('strategy')}"
    return stored


def _modelopt(quantized: str, *more: str) -> Callable[[Statement, bool], Rules]:
    def rules(statement: Statement, multimodal: bool) -> Rules:
        return ModeloptRules(
            entries=statement.entries,
            multimodal=multimodal,
            quantized=frozenset({quantized, *more}),
        )

    return rules


def _mixed(statement: Statement, multimodal: bool) -> Rules:
    layers = statement.read.get("quantized_layers") or {}
    return MixedRules(
        entries=statement.entries,
        multimodal=multimodal,
        quantized=frozenset(),
        algos=mixed_algos(layers, multimodal),
    )


def _compressed_tensors(statement: Statement, multimodal: bool) -> Rules:
    return CompressedTensorsRules(
        entries=statement.entries, multimodal=multimodal, targets=statement.targets
    )


def _fp8(statement: Statement, multimodal: bool) -> Rules:
    return Fp8Rules(entries=statement.entries, multimodal=multimodal)


def _modelopt_form(statement: Statement, trunk: Iterable[LinearModule], head: Form) -> Form:
    """With input scales if the head has them: nothing in the base says otherwise."""
    return "nvfp4-modelopt-w4a16" if head.endswith("w4a16") else "nvfp4-modelopt"


def _mixed_form(statement: Statement, trunk: Iterable[LinearModule], head: Form) -> Form:
    """As the base's own experts, whose kernels are there; where they aren't NVFP4, as it is."""
    plain = any(module.is_experts and module.stored == NVFP4_W4A16 for module in trunk)
    return "nvfp4-modelopt-w4a16" if plain else _modelopt_form(statement, trunk, head)


def _compressed_tensors_form(
    statement: Statement, trunk: Iterable[LinearModule], head: Form
) -> Form:
    """As the config group says that reaches the head's experts."""
    rules = _compressed_tensors(statement, False).with_entries([])
    layouts = rules.layouts(FIRST_EXPERTS)
    if layouts == {UNQUANTIZED}:
        raise UserError(
            "a config group of the base whose targets reach mtp.layers.N.mlp.experts",
            f"targets {', '.join(sorted(statement.targets))}",
            "graft the BF16 form of the head",
        )
    whole = layouts == {CT_NVFP4}
    return "nvfp4-compressed-tensors" if whole else "nvfp4-compressed-tensors-w4a16"


def _always(form: Form) -> Callable[[Statement, Iterable[LinearModule], Form], Form]:
    return lambda statement, trunk, head: form


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="none", layouts=frozenset(),
            rules=_modelopt(NVFP4, NVFP4_W4A16), nvfp4_form=_modelopt_form,
        ),
        Scheme(
            name="modelopt NVFP4", layouts=frozenset({NVFP4}),
            rules=_modelopt(NVFP4), nvfp4_form=_always("nvfp4-modelopt"),
        ),
        Scheme(
            name="modelopt W4A16_NVFP4", layouts=frozenset({NVFP4, NVFP4_W4A16}),
            rules=_modelopt(NVFP4, NVFP4_W4A16), nvfp4_form=_always("nvfp4-modelopt-w4a16"),
        ),
        Scheme(
            name="modelopt MIXED_PRECISION",
            layouts=frozenset({NVFP4, NVFP4_W4A16, FP8, FP8_BLOCK}),
            rules=_mixed, nvfp4_form=_mixed_form,
        ),
        Scheme(
            name=f"compressed-tensors {CT_FORMAT}", layouts=frozenset({CT_NVFP4, CT_NVFP4_W4A16}),
            rules=_compressed_tensors, nvfp4_form=_compressed_tensors_form,
        ),
        Scheme(
            name="fp8 block", layouts=frozenset({FP8_BLOCK}),
            rules=_fp8, nvfp4_form=_always("bf16-per-expert"),
        ),
    )
}  # fmt: skip


def identify(statement: Statement, trunk: Iterable[LinearModule], where: str) -> Scheme:
    """The row for a base, by its config and its tensors.

    Raises:
        UnknownQuantization: no row has that name.
        UserError: config and tensors disagree.
    """
    scheme = SCHEMES.get(statement.name)
    stored = {module.stored for module in trunk if module.quantized}
    if scheme is None:
        reason = ""
        if statement.name.endswith("without config_groups"):
            reason = ": vLLM would build every layer unquantized and find no place for the weights"
        raise UnknownQuantization(
            f"a base with one of these quantizations: {', '.join(SCHEMES)}",
            f"{statement.name}{reason}, stored as {', '.join(sorted(stored)) or UNQUANTIZED}, "
            f"in {where}",
            "use the BF16 base, or one quantized in a form above",
        )
    if stray := sorted(stored - scheme.layouts):
        raise UserError(
            f"tensors as the config of {where} states them ({scheme.name})",
            f"{', '.join(stray)}",
            "restore the config that belongs to these tensors",
        )
    return scheme


def precision_problems(checkpoint: Checkpoint) -> list[str] | str:
    """Modules that vLLM would not load as they are stored; a text if nothing can be said.

    Raises:
        UserError: config and tensors disagree altogether.
    """
    statement = read_statement(checkpoint)
    multimodal = is_multimodal(checkpoint.config)
    modules = linear_modules(checkpoint.infos(), multimodal)
    try:
        scheme = identify(statement, modules, str(checkpoint.folder))
    except UnknownQuantization as error:
        return str(error)
    if scheme.name == "none":
        return []
    problems = _two_files(statement)
    return problems + wrong_modules(modules, scheme.rules(statement, multimodal))


def _two_files(statement: Statement) -> list[str]:
    if not statement.block or not statement.file:
        return []
    inner = statement.file.get("quantization") or {}
    problems = []
    if (statement.block.get("ignore") or []) != (inner.get("exclude_modules") or []):
        problems.append("config.json and hf_quant_config.json exclude different modules")
    ours, theirs = statement.block.get("quantized_layers"), inner.get("quantized_layers")
    if ours is not None and theirs is not None and ours != theirs:
        problems.append("config.json and hf_quant_config.json list different quantized layers")
    return problems
