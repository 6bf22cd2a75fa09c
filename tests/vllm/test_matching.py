"""Our matching rules against vLLM's own functions, on generated lists and every module name."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import random_head, write_base

from graft import matching
from graft.matching import (
    CompressedTensorsRules,
    Fp8Rules,
    MixedRules,
    ModeloptRules,
    match_target,
    mixed_algos,
    resolve_mixed,
)
from graft.modules import CT_NVFP4, NVFP4, UNQUANTIZED, LinearModule, linear_modules
from graft.reader import Checkpoint

NUM_LISTS = 100
PATTERNS = (
    "mtp", "mtp*", "mtp.*", "mtp.layers.0*", "mtp.fc", "lm_head", "*lm_head*", ".mlp.gate", "*",
    "*layers.3.*", "*self_attn*", "*.mlp.gate", "model.visual*", "model.visual.*",
    "model.language_model.layers.1*", "model.layers.1*", "mtp.layers.*.mlp.shared_expert*",
    "mtp.layers.1.mlp.experts.0.up_proj", "mtp.layers.*.self_attn.q_proj", "experts",
)  # fmt: skip
REGEXES = (
    "re:^mtp.*", r"re:^mtp\.fc$", r"re:^mtp\.layers\.\d+\.self_attn\..*", "re:.*q_proj$",
    r"re:^mtp\.layers\.\d+\.mlp\.(gate|shared_expert_gate|shared_expert\..*)$", "re:.*gate",
    r"re:.*experts\.0\.gate_proj", r"re:.*experts\..*", "re:mlp", "re:.*(q|k|v)_proj",
    r"re:.*linear_attn\..*", "re:visual.*", "re:model.visual.*", "re:.*lm_head",
)  # fmt: skip
FAMILIES = ("modelopt", "mixed", "compressed-tensors", "fp8")


@pytest.fixture(scope="module", params=["multimodal", "text-only"])
def modules(request, tmp_path_factory) -> tuple[list[LinearModule], bool]:
    """All modules of a tiny base with a two-layer head."""
    multimodal = request.param == "multimodal"
    layout: dict[str, Any] = {} if multimodal else {"nested": False}
    folder = tmp_path_factory.mktemp("names")
    base = Checkpoint(
        write_base(folder / "base", head_layers=2, head_form="bf16-per-expert", **layout)
    )
    assert random_head(base.text_config, 2, "bf16-fused").keys() != set(base.head_names)
    return linear_modules(base.infos(), multimodal), multimodal


def vllm_classes(multimodal: bool) -> tuple[Any, Any]:
    from vllm.model_executor.models import qwen3_5
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP

    name = "ForConditionalGeneration" if multimodal else "ForCausalLM"
    return getattr(qwen3_5, f"Qwen3_5Moe{name}"), Qwen3_5MoeMTP


def generated_list(modules: list[LinearModule], family: str, chance: random.Random) -> list[str]:
    members = [name for module in modules for name in module.members]
    entries = chance.sample(members, chance.randint(0, 6))
    if chance.random() < 0.5:  # a whole fused module at times, half of it at others
        entries += chance.choice(modules).members
    pool = REGEXES if family == "compressed-tensors" else PATTERNS
    entries += chance.sample(pool, chance.randint(0, 3))
    cut = chance.choice(members)
    entries.append(cut[: chance.randint(3, len(cut))] + chance.choice(["", "*", ".*"]))
    chance.shuffle(entries)
    return entries


def generated_config(family: str, modules: list[LinearModule], chance: random.Random) -> Any:
    """vLLM's config object for a generated list, and our rules for the same."""
    entries = generated_list(modules, family, chance)
    members = [name for module in modules for name in module.members]
    if family == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": entries}
    if family == "mixed":
        layers = {
            name + chance.choice(["", "", ".7.up_proj"]): {
                "quant_algo": chance.choice(["NVFP4", "W4A16_NVFP4", "fp8"])}
            for name in chance.sample(members, 12)
        }  # fmt: skip
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": entries,
                "quantized_layers": layers}  # fmt: skip
    if family == "fp8":
        return {"quant_method": "fp8", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128], "modules_to_not_convert": entries}  # fmt: skip
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
               "symmetric": True, "dynamic": False}  # fmt: skip
    targets = [["Linear"], chance.sample(members, 3), chance.sample(REGEXES, 2), ["RoutedExperts"]]
    groups = {
        f"group_{number}": {"targets": chosen, "weights": weights, "input_activations": inputs}
        for number, (chosen, inputs) in enumerate(
            zip(chance.sample(targets, 2), [weights | {"dynamic": "local"}, None], strict=True)
        )
    }
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "config_groups": groups, "ignore": entries}  # fmt: skip


def vllm_config(config: dict[str, Any], multimodal: bool) -> Any:
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    kind = {
        "NVFP4": modelopt.ModelOptNvFp4Config,
        "MIXED_PRECISION": modelopt.ModelOptMixedPrecisionConfig,
    }.get(config.get("quant_algo", ""))
    if kind is None:
        is_fp8 = config["quant_method"] == "fp8"
        kind = Fp8Config if is_fp8 else compressed_tensors.CompressedTensorsConfig
    made = kind.from_config({**config})
    target, _ = vllm_classes(multimodal)
    made.apply_vllm_mapper(target.hf_to_vllm_mapper.get_rename_mapper())
    return made


def our_rules(config: dict[str, Any], multimodal: bool) -> Any:
    common: dict[str, Any] = {
        "entries": tuple(config.get("ignore") or config.get("modules_to_not_convert") or ()),
        "multimodal": multimodal,
    }
    if config["quant_method"] == "fp8":
        return Fp8Rules(**common)
    if config["quant_method"] == "compressed-tensors":
        targets = {
            target: bool(group["input_activations"])
            for group in config["config_groups"].values()
            for target in group["targets"]
        }
        return CompressedTensorsRules(**common, targets=targets)
    if layers := config.get("quantized_layers"):
        algos = mixed_algos(layers, multimodal)
        return MixedRules(**common, quantized=frozenset(), algos=algos)
    return ModeloptRules(**common, quantized=frozenset({NVFP4}))


def verdict_of(function: Any) -> Any:
    try:
        return function()
    except ValueError:
        return "refused"


def vllm_verdict(made: Any, module: LinearModule) -> Any:
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    kind = type(made).__name__
    if kind == "Fp8Config":
        return is_layer_skipped(
            module.prefix, made.ignored_layers, made.packed_modules_mapping,
            match_mode=made.ignored_layers_match_mode,
        )  # fmt: skip
    if kind == "CompressedTensorsConfig":
        return compressed_tensors_verdict(made, module)
    if made.is_layer_excluded(module.prefix):
        return True
    return made._resolve_quant_algo(module.prefix) if kind.endswith("PrecisionConfig") else False


def compressed_tensors_verdict(made: Any, module: LinearModule) -> Any:
    """As `get_quant_method` and `get_moe_method` do it, up to the choice of a kernel."""
    name = module.prefix.rpartition(".")[2]
    kinds = {"experts": "RoutedExperts", "lm_head": "ParallelLMHead"}
    layer = type(kinds.get(name, "RowParallelLinear"), (), {})()
    names = [module.prefix]
    if module.is_experts:
        made._add_fused_moe_to_target_scheme_map()
        names = [f"{module.prefix}.0.{part}_proj" for part in ("gate", "up", "down")]
    schemes = [made.get_scheme_dict(layer, name) for name in names]
    if any(scheme != schemes[0] for scheme in schemes):
        raise ValueError("several schemes")
    return None if schemes[0] is None else schemes[0]["input_activations"] is not None


def our_verdict(rules: Any, module: LinearModule) -> Any:
    if isinstance(rules, Fp8Rules):
        return rules.excludes(module)
    if isinstance(rules, CompressedTensorsRules):
        layouts = rules.resolved(module)
        return None if layouts == {UNQUANTIZED} else layouts == {CT_NVFP4}
    if rules.excludes(module):
        return True
    if isinstance(rules, MixedRules):
        return matching.resolve_mixed(module.prefix, rules.algos, rules.fused(module))
    return False


def disagreements(family: str, modules: list[LinearModule], multimodal: bool) -> list[str]:
    """Where vLLM and we judge a module differently, over `NUM_LISTS` generated configs."""
    found, seen = [], set()
    target, draft = vllm_classes(multimodal)
    for seed in range(NUM_LISTS):
        config = generated_config(family, modules, random.Random(f"{family}{seed}"))
        made, rules = vllm_config(config, multimodal), our_rules(config, multimodal)
        for module in modules:
            kind = draft if module.is_head else target
            made.packed_modules_mapping = kind.packed_modules_mapping
            theirs = verdict_of(lambda m=module, q=made: vllm_verdict(q, m))
            ours = verdict_of(lambda m=module, r=rules: our_verdict(r, m))
            seen.add(theirs)
            if theirs != ours:
                found.append(f"{module.prefix}: vLLM {theirs}, we {ours}; {config}")
    assert len(seen) > 2, f"only {seen} occurred: the generator tests too little"
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_our_rules_are_vllms(family, modules):
    found = disagreements(family, *modules)
    assert not found, f"{len(found)}: {found[0]}"


def no_containment(prefix, entries, fused, original=matching.is_skipped):
    return original(prefix, entries, fused) if "experts" not in prefix else prefix in entries


def no_siblings(prefix, algos, fused):
    if prefix.endswith(".experts") and not any(name.startswith(prefix) for name in algos):
        return None
    return resolve_mixed(prefix, algos, fused)


@pytest.mark.parametrize(
    ("family", "name", "broken"),
    [
        ("modelopt", "fnmatch", lambda name, pattern: False),
        ("modelopt", "is_skipped", no_containment),
        ("fp8", "is_skipped", no_containment),
        ("compressed-tensors", "_equal_or_regex", lambda name, entry: name == entry),
        ("compressed-tensors", "match_target",
         lambda name, kind, targets, fused: match_target(name, "", targets, fused)),
        ("mixed", "_mixed_spellings", lambda prefix: []),
        ("mixed", "resolve_mixed", no_siblings),
    ],
)  # fmt: skip
def test_a_changed_rule_is_caught(family, name, broken, modules, monkeypatch):
    monkeypatch.setattr(matching, name, broken)
    assert disagreements(family, *modules)
