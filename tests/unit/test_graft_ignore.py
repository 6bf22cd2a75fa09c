"""The exclusion list, judged by vLLM's rules as `facts` and vLLM's source describe them."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import BASES, write_base

from graft.errors import UserError
from graft.formats import head_tensors
from graft.ignore import derive_ignore, wrong_modules
from graft.index import TensorInfo
from graft.matching import (
    ModeloptRules,
    is_excluded,
    map_entries,
    matches,
)
from graft.modules import DRAFT_FUSED, NVFP4, TARGET_FUSED, UNQUANTIZED, linear_modules
from graft.reader import Checkpoint


def modelopt(entries, multimodal):
    return ModeloptRules(
        entries=tuple(entries), multimodal=multimodal, quantized=frozenset({NVFP4})
    )


def restored(modules, is_quantized):
    """The same modules, quantized where the function says so."""
    return [replace(m, stored=NVFP4 if is_quantized(m) else UNQUANTIZED) for m in modules]


def infos(specification):
    return [
        TensorInfo(name=n, dtype=d, shape=s, shard=None, offset=0, nbytes=0)
        for n, (d, s) in specification.items()
    ]


def modules_of(tmp_path, form, **layout):
    base = Checkpoint(write_base(tmp_path / "base", **layout))
    trunk = [i for i in base.infos() if not i.name.startswith("mtp.")]
    multimodal = layout.get("nested", True)
    head = infos(head_tensors(base.text_config, 4, form))
    return linear_modules([*trunk, *head], multimodal), multimodal


@pytest.mark.parametrize(
    ("entry", "prefix", "verdict"),
    [
        ("mtp*", "mtp.layers.2.mlp.experts", True),
        ("mtp", "mtp.layers.2.mlp.experts", True),
        ("mtp.layers.0*", "mtp.layers.0.mlp.experts", True),
        ("mtp.layers.0*", "mtp.layers.1.self_attn.qkv_proj", False),
        ("mtp.layers.*.self_attn*", "mtp.layers.3.self_attn.qkv_proj", True),
        ("mtp.layers.*.mlp.gate", "mtp.layers.3.mlp.experts", False),
        # One expert named: the whole MoE module turns BF16.
        ("mtp.layers.0.mlp.experts.7.gate_proj", "mtp.layers.0.mlp.experts", True),
        # Plain substring: a dense head's gate_up_proj is hit by the router's name.
        (".mlp.gate", "mtp.layers.0.mlp.gate_up_proj", True),
        ("*layers.3.*", "mtp.layers.3.mlp.experts", True),
        ("re:^mtp.*", "mtp.fc", False),
    ],
)
def test_vllm_rules(entry, prefix, verdict):
    assert is_excluded(prefix, [entry], DRAFT_FUSED) is verdict


@settings(max_examples=300, deadline=None)
@given(st.text("ab.*?[]!", max_size=6), st.text("ab.", max_size=6))
def test_entries_without_wildcards_skip_fnmatch_and_mean_the_same(entry, prefix):
    assert matches(prefix, entry) == fnmatch(prefix, entry)


def test_bug_B4_a_fused_group_is_listed_whole_or_not_at_all():
    prefix = "model.layers.3.self_attn.qkv_proj"
    members = [f"model.layers.3.self_attn.{name}_proj" for name in "qkv"]
    assert is_excluded(prefix, members, TARGET_FUSED)
    with pytest.raises(ValueError, match="some but not all"):
        is_excluded(prefix, members[:1], TARGET_FUSED)


def test_entries_are_mapped_for_the_target_model():
    assert map_entries(["model.language_model.layers*"], multimodal=True) == [
        "language_model.model.layers", "language_model.model.layers.*"]  # fmt: skip
    assert map_entries(["model.visual*"], multimodal=True) == ["model.visual", "visual.*"]
    assert map_entries(["model.visual.*", "lm_head"], multimodal=True) == ["visual.*", "lm_head"]
    assert map_entries(["model.language_model.norm"], multimodal=False) == ["model.norm"]


@pytest.mark.parametrize("name", [n for n in BASES if "dense" not in n])
def test_bug_B1_nvfp4_head_on_a_bf16_base_few_entries_all_right(tmp_path, name):
    modules, multimodal = modules_of(tmp_path, "nvfp4-modelopt", **BASES[name])
    entries = derive_ignore(modules, modelopt([], multimodal))
    assert wrong_modules(modules, modelopt(entries, multimodal)) == []
    assert len(entries) <= 8 and "mtp.fc" in entries and "lm_head" in entries
    assert sum(m.quantized for m in modules) == 4  # the experts of four layers, nothing else
    # Negative control: every entry is needed, and the check sees it missing.
    for entry in set(entries) - {"lm_head"}:
        assert wrong_modules(modules, modelopt([e for e in entries if e != entry], multimodal)), (
            entry
        )


def test_harmful_entries_of_the_base_are_dropped_and_others_kept(tmp_path):
    modules, multimodal = modules_of(tmp_path, "nvfp4-modelopt")
    harmful = ["mtp", "mtp*", "mtp.*", "mtp.layers.0*", "mtp.layers.1.mlp.experts.0.up_proj"]
    entries = derive_ignore(
        modules, modelopt([*harmful, "model.visual*", "unknown.thing"], multimodal)
    )
    assert not set(harmful) & set(entries)
    assert {"model.visual*", "unknown.thing"} <= set(entries)


def test_bug_B2_bf16_head_on_a_quantized_base_is_excluded_with_its_experts(tmp_path):
    modules, multimodal = modules_of(tmp_path, "bf16-fused")
    modules = restored(modules, lambda m: not m.is_head and m.is_experts)
    entries = derive_ignore(modules, modelopt(["lm_head"], multimodal))
    assert wrong_modules(modules, modelopt(entries, multimodal)) == []
    assert "mtp*" in entries


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_mix_of_precisions_gets_a_right_list_or_a_refusal(tmp_path_factory, data):
    modules, multimodal = modules_of(tmp_path_factory.mktemp("m"), "bf16-fused")
    modules = restored(modules, lambda m: data.draw(st.booleans()))
    known = ["mtp*", "*layers.3.*", "lm_head", "model.language_model.layers.0*", ".mlp.gate"]
    existing = data.draw(st.lists(st.sampled_from(known)))
    try:
        entries = derive_ignore(modules, modelopt(existing, multimodal))
    except UserError:
        return
    assert wrong_modules(modules, modelopt(entries, multimodal)) == []


def test_a_fused_module_of_mixed_precision_is_refused(tmp_path):
    names = [f"mtp.layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    specification = dict.fromkeys(names, ("BF16", (4, 4))) | {names[0]: ("U8", (4, 2))}
    with pytest.raises(UserError, match="fuses"):
        linear_modules(infos(specification), multimodal=False)
