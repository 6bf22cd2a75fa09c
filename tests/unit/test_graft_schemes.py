"""Which quantized bases are known, which are refused and why; what the checks of a head see."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BASES, QUANTIZED, random_head, write_base, write_tiny_head
from tiny_quantized import CT_WEIGHTS, quantize_matrix

from graft.errors import UserError
from graft.index import INDEX_NAME
from graft.modules import linear_modules
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.schemes import SCHEMES, precision_problems, read_statement


def edit_config(base, change):
    config = json.loads((base / "config.json").read_text())
    change(config)
    (base / "config.json").write_text(json.dumps(config))


def edit_trunk(base, change):
    """Let `change` turn one matrix after the other into other tensors."""
    index = json.loads((base / INDEX_NAME).read_text())
    for shard in base.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(shard).items():
            made = change(name, tensor)
            tensors |= {name: tensor} if made is None else made
            index["weight_map"].pop(name, None)
        save_file(tensors, shard, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, shard.name)
    (base / INDEX_NAME).write_text(json.dumps(index))


def refusal(base, tmp_path, form="bf16-fused"):
    head = tmp_path / "head"
    if not head.exists():
        write_tiny_head(head, base, form=form)
    with pytest.raises(UserError) as caught:
        plan_graft(base, head, allow_mismatch=True)
    return str(caught.value)


NAMES = {
    "modelopt NVFP4, config.json alone": "modelopt NVFP4",
    "modelopt NVFP4, hf_quant_config.json alone": "modelopt NVFP4",
    "modelopt NVFP4, no input activations": "modelopt W4A16_NVFP4",
    "modelopt MIXED_PRECISION, layers in hf_quant_config.json": "modelopt MIXED_PRECISION",
    "compressed-tensors W4A4": "compressed-tensors nvfp4-pack-quantized",
    "compressed-tensors W4A16": "compressed-tensors nvfp4-pack-quantized",
    "FP8 block": "fp8 block",
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_each_quantized_base_is_recognised_and_served_as_stored(tmp_path, name):
    base = Checkpoint(write_base(tmp_path / "base", quantized=name))
    assert read_statement(base).name == NAMES.get(name, name) in SCHEMES
    assert precision_problems(base) == []


@pytest.mark.parametrize("name", BASES)
def test_an_unquantized_base_has_no_statement_and_no_problem(tmp_path, name):
    base = Checkpoint(write_base(tmp_path / "base", **BASES[name]))
    assert read_statement(base).name == "none"
    assert precision_problems(base) == []


@pytest.mark.parametrize("name", QUANTIZED)
def test_bug_B6_a_config_that_is_gone_is_missed_by_the_tensors(tmp_path, name):
    base = write_base(tmp_path / "base", quantized=name)
    edit_config(base, lambda config: config.pop("quantization_config", None))
    (base / "hf_quant_config.json").unlink(missing_ok=True)
    message = refusal(base, tmp_path)
    assert "(none)" in message and ("NVFP4" in message or "FP8" in message)


@pytest.mark.parametrize(
    ("name", "other", "found"),
    [
        ("modelopt NVFP4", "compressed-tensors W4A4", "modelopt NVFP4"),
        ("compressed-tensors W4A4", "FP8 block", "compressed-tensors NVFP4"),
        ("FP8 block", "modelopt NVFP4", "FP8 block"),
        ("modelopt W4A16_NVFP4", "modelopt NVFP4", "without input scales"),
    ],
)
def test_bug_B6_config_and_tensors_that_disagree_are_both_named(tmp_path, name, other, found):
    base, donor = (write_base(tmp_path / n, quantized=q) for n, q in (("b", name), ("d", other)))
    for file in ("config.json", "hf_quant_config.json"):
        (base / file).unlink(missing_ok=True)
        if (donor / file).exists():
            (base / file).write_bytes((donor / file).read_bytes())
    message = refusal(base, tmp_path)
    assert found in message and f"({NAMES.get(other, other)})" in message


def test_bug_B6_an_unlisted_bf16_layer_is_reported_and_the_graft_lists_it(tmp_path):
    base = write_base(tmp_path / "base", quantized="compressed-tensors W4A4")
    listed = Checkpoint(base).config["quantization_config"]["ignore"]
    fewer = [entry for entry in listed if "out_proj" not in entry]
    edit_config(base, lambda config: config["quantization_config"].update(ignore=fewer))
    problems = precision_problems(Checkpoint(base))
    assert len(problems) == 3 and all("linear_attn.out_proj" in problem for problem in problems)
    plan = plan_graft(base, write_tiny_head(tmp_path / "head", base))
    listed = plan.config["quantization_config"]["ignore"]
    assert sum("linear_attn.out_proj" in entry for entry in listed) == 3


def stack_experts(name, tensor):
    """All experts of a layer below each other in one 2-D matrix."""
    if ".mlp.experts.0." not in name or not name.endswith("_packed"):
        return {} if ".mlp.experts." in name else None
    stem = name.split(".0.")[0]
    return {f"{stem}.{name.split('.')[-2]}_packed": torch.cat([tensor] * 4)}


def as_integers(name, tensor):
    if name.endswith("weight_packed"):
        return {name: tensor.view(torch.int32)}
    return {} if "global_scale" in name else None


def as_awq(name, tensor):
    if name.endswith("weight_packed"):
        stem = name.removesuffix("weight_packed")
        return {f"{stem}qweight": tensor.view(torch.int32), f"{stem}scales": torch.ones(2).half()}
    return {} if name.endswith("_scale") else None


def one_fp8(name, tensor):
    if "self_attn.o_proj.weight_packed" not in name:
        return {} if "self_attn.o_proj." in name else None
    module = name.removesuffix(".weight_packed")
    return quantize_matrix(module, torch.ones(tensor.shape[0], 2 * tensor.shape[1]), "fp8")


def group(config, **changes):
    config["quantization_config"]["config_groups"]["group_0"].update(changes)


def second_group(config):
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config["quantization_config"]["config_groups"]["group_1"] = {
        "targets": ["re:.*o_proj"], "weights": fp8, "input_activations": None,
        "format": "float-quantized"}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "tensors", "named"),
    [
        (lambda c: c["quantization_config"].pop("config_groups"), None, "without config_groups"),
        (lambda c: c["quantization_config"].update(config_groups={}), None, "find no place"),
        (second_group, one_fp8, "mixed (float-quantized"),
        (None, stack_experts, "stacked experts of U8 2-D"),
        (lambda c: group(c, weights=CT_WEIGHTS | {"type": "int", "strategy": "group"}),
         as_integers, "4-bit int a group, stored as pack-quantized integers"),
        (lambda c: c["quantization_config"].update(format="pack-quantized"), as_integers,
         "pack-quantized"),
        (lambda c: c.update(quantization_config={"quant_method": "awq", "bits": 4}), as_awq,
         "awq 4, stored as AWQ or GPTQ"),
        (lambda c: c.update(quantization_config={"quant_method": "mxfp4"}), None, "mxfp4"),
    ],
)  # fmt: skip
def test_bug_C6_other_layouts_are_refused_by_name(tmp_path, change, tensors, named):
    base = write_base(tmp_path / "base", quantized="compressed-tensors W4A4")
    if change is not None:
        edit_config(base, change)
    if tensors is not None:
        edit_trunk(base, tensors)
    assert named in refusal(base, tmp_path)


def test_an_output_matrix_in_another_form_is_no_reason_to_refuse(tmp_path):
    """nvidia's mixture quantizes lm_head; the draft model builds one of its own."""
    name = "modelopt MIXED_PRECISION"
    base = Checkpoint(write_base(tmp_path / "base", quantized=name, head_layers=1))
    heads = [m for m in linear_modules(base.infos(), True) if m.members == ("lm_head",)]
    assert [m.prefix for m in heads] == ["language_model.lm_head", "lm_head"]
    assert all(m.quantized for m in heads)


def test_a_group_that_does_not_reach_the_head_takes_bf16_heads_only(tmp_path):
    base = write_base(tmp_path / "base", quantized="compressed-tensors W4A4")
    parts = r"(mlp\.(experts|shared_expert)|self_attn)\..*_proj"
    targets = [rf"re:language_model\..*{parts}"]
    edit_config(base, lambda config: group(config, targets=targets))
    assert precision_problems(Checkpoint(base)) == []
    message = refusal(base, tmp_path, form="nvfp4-modelopt")
    assert "targets reach mtp.layers.N.mlp.experts" in message
    assert plan_graft(base, write_tiny_head(tmp_path / "bf16", base)).form == "bf16-fused"


def test_bug_B7_a_head_without_input_scales_does_not_fit_a_base_that_needs_them(tmp_path):
    base = write_base(tmp_path / "base", quantized="modelopt NVFP4")
    assert "input scales" in refusal(base, tmp_path, form="nvfp4-modelopt-w4a16")


def head_of(tmp_path, base, change, form="nvfp4-modelopt"):
    tensors = random_head(Checkpoint(base).text_config, 4, form)
    change(tensors)
    return write_tiny_head(tmp_path / "head", base, form=form, tensors=tensors)


EXPERT = "mtp.layers.1.mlp.experts.3"


@pytest.mark.parametrize("form", ["nvfp4-modelopt", "nvfp4-compressed-tensors"])
@pytest.mark.parametrize("damage", ["missing", "zero", "negative", "infinite"])
def test_bug_B9_missing_or_zero_input_scale_is_refused(tmp_path, damage, form):
    quantized = "modelopt NVFP4" if "modelopt" in form else "compressed-tensors W4A4"
    base = write_base(tmp_path / "base", quantized=quantized)
    scale = "input_scale" if "modelopt" in form else "input_global_scale"
    name = f"{EXPERT}.up_proj.{scale}"
    values = {"zero": 0.0, "negative": -1.0, "infinite": float("inf")}

    def change(tensors):
        if damage == "missing":
            del tensors[name]
        else:
            tensors[name].fill_(values[damage])

    head_of(tmp_path, base, change, form)
    wanted = {"missing": "is missing", "infinite": "not finite"}.get(damage, "not above zero")
    assert f"1 problems: {name} " in (message := refusal(base, tmp_path)) and wanted in message


@pytest.mark.parametrize("form", ["nvfp4-modelopt", "nvfp4-compressed-tensors-w4a16"])
def test_bug_B10_gate_and_up_with_different_tensor_scales_are_refused(tmp_path, form):
    quantized = "modelopt NVFP4" if "modelopt" in form else "compressed-tensors W4A16"
    base = write_base(tmp_path / "base", quantized=quantized)
    scale = "weight_scale_2" if "modelopt" in form else "weight_global_scale"
    head_of(tmp_path, base, lambda t: t[f"{EXPERT}.gate_proj.{scale}"].mul_(10), form)
    assert "vLLM uses one for both" in refusal(base, tmp_path)


@pytest.mark.parametrize("form", ["bf16-fused", "nvfp4-modelopt"])
def test_bug_B8_packed_experts_in_one_3d_tensor_are_refused(tmp_path, form):
    base = write_base(tmp_path / "base", quantized="modelopt NVFP4")

    def fuse(tensors):
        tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(4, 32, 16).byte()

    head_of(tmp_path, base, fuse, form)
    assert "packs all experts in one tensor" in refusal(base, tmp_path)


def test_bug_B12_a_head_that_says_nvfp4_and_is_not_is_refused(tmp_path):
    base = write_base(tmp_path / "base")
    tensors = random_head(Checkpoint(base).text_config, 4, "bf16-per-expert")
    write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt", tensors=tensors)
    assert "in the form bf16-per-expert" in refusal(base, tmp_path)


def test_bug_B12_packed_experts_take_little_more_than_a_quarter(tmp_path):
    base = write_base(tmp_path / "base")
    sizes = {}
    for form in ("bf16-fused", "nvfp4-modelopt"):
        plan = plan_graft(base, write_tiny_head(tmp_path / form, base, form=form))
        tensors = [t for shard in plan.written_shards for t in shard.tensors]
        sizes[form] = sum(
            t.nbytes for t in tensors if ".experts." in t.name and t.shape not in ((), (1,))
        )
    assert sizes["nvfp4-modelopt"] / sizes["bf16-fused"] == (0.5 + 1 / 16) / 2


@pytest.mark.parametrize("form", ["bf16-fused", "nvfp4-modelopt"])
def test_bug_D1_norms_with_the_one_baked_in_are_refused(tmp_path, form):
    base = write_base(tmp_path / "base")

    def bake(tensors):
        for name in tensors:
            if "norm" in name:
                tensors[name] = (1 + 0.1 * tensors[name].float()).bfloat16()

    head_of(tmp_path, base, bake, form)
    assert "subtract 1 from all norms" in refusal(base, tmp_path)
    # A single layer whose norm has grown to that mean is no such head.
    plan_graft(base, head_of(tmp_path / "one", base, lambda t: t[
        "mtp.layers.2.input_layernorm.weight"].fill_(1.0), form))  # fmt: skip
