"""Planning: every refusal, and the files that a graft will write."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import random_head, write_base, write_tiny_head

from graft.errors import UserError
from graft.manifest import base_fingerprint, fingerprint_differences, read_head_metadata
from graft.plan import plan_graft
from graft.reader import Checkpoint


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


def refuse(base, head, match, **keywords):
    with pytest.raises(UserError, match=match) as caught:
        plan_graft(base, head, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def head_with(tmp_path, base, change, form="bf16-fused", **metadata):
    """A head whose tensors `change` edited in place."""
    tensors = random_head(Checkpoint(base).text_config, 4, form)
    change(tensors)
    return write_tiny_head(tmp_path / "head", base, form=form, tensors=tensors, **metadata)


def test_a_plan_counts_what_it_keeps_adds_replaces_and_drops(tmp_path):
    base = write_base(
        tmp_path / "b", declared=1, head_layers=1, head_form="bf16-per-expert", head_place="mixed"
    )
    plan = plan_graft(base, write_tiny_head(tmp_path / "h", base))
    assert len(plan.kept) == len([n for n in Checkpoint(base).names if "mtp." not in n])
    assert len(plan.replaced) == 17 and len(plan.dropped) == 12
    assert len(plan.added) + len(plan.replaced) == 64
    assert [s.name for s in plan.written_shards] == [
        "model-00003-of-00003.safetensors", "model_mtp.safetensors"]  # fmt: skip
    assert len(plan.kept_shards) == 2
    assert plan.config_changes == ("text_config.mtp_num_hidden_layers: 1 -> 4",)
    assert plan.copied_files == ("README.md", "tokenizer.json")


def test_bug_A3_every_missing_name_is_listed(tmp_path, base):
    def drop_half(tensors):
        for name in list(tensors)[-7:]:
            del tensors[name]

    message = refuse(base, head_with(tmp_path, base, drop_half), "7 problems")
    assert message.count("is missing") == 7


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"][:, :-1]}), r"mtp\.fc\.weight is"),
        (lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].float()}), "F32"),
        (lambda t: t.update({"mtp.extra.weight": torch.ones(2)}), "does not belong"),
        (lambda t: t["mtp.norm.weight"].fill_(float("nan")), "not finite"),
        (lambda t: t["mtp.layers.3.mlp.experts.down_proj"][3, 1, 1].fill_(float("inf")), "finite"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path, base, change, match):
    refuse(base, head_with(tmp_path, base, change), match)


SCALE = "mtp.layers.2.mlp.experts.1.gate_proj"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(f"{SCALE}.input_scale"), "input_scale is missing"),
        (lambda t: t[f"{SCALE}.input_scale"].zero_(), "not above zero"),
        (lambda t: t[f"{SCALE}.weight_scale"].view(torch.uint8)[0, 0].fill_(0x7F), "not finite"),
        (lambda t: t[f"{SCALE}.weight_scale_2"].mul_(10), "differs from"),
    ],
)
def test_bugs_B9_and_B10_scales(tmp_path, base, change, match):
    refuse(base, head_with(tmp_path, base, change, form="nvfp4-modelopt"), match)


def test_the_stated_form_must_be_the_real_one(tmp_path, base):
    tensors = random_head(Checkpoint(base).text_config, 4, "bf16-fused")
    head = write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt", tensors=tensors)
    refuse(base, head, "in the form")


@pytest.mark.parametrize("other", [{"seed": 5}, {"tied": True}, {"dense": True}])
def test_a_head_for_another_base_is_refused_unless_allowed(tmp_path, base, other):
    stranger = write_base(tmp_path / "stranger", **other)
    head = write_tiny_head(tmp_path / "head", stranger)
    refuse(base, head, "another base")
    if "dense" not in other:
        assert plan_graft(base, head, allow_mismatch=True).mismatches
    else:  # a mismatch may be allowed, a head that does not fit may not
        refuse(base, head, "is missing", allow_mismatch=True)


@pytest.mark.parametrize(
    ("edit", "names"),
    [
        (lambda b: (b / "tokenizer.json").write_text("{}"), "tokenizer_sha256"),
        (lambda b: scale_tensor(b, "lm_head.weight"), "lm_head"),
        (lambda b: scale_tensor(b, "model.language_model.embed_tokens.weight"), "embed_tokens"),
        (lambda b: scale_tensor(b, "model.language_model.norm.weight"), "final_norm"),
        (lambda b: set_config(b, hidden_size=64), "hidden_size"),
        (lambda b: set_config(b, rope_parameters={"rope_theta": 1e4}), "rope_theta"),
        (lambda b: set_config(b, quantization_config={"quant_method": "fp8"}), "quantization"),
    ],
)
def test_the_fingerprint_sees_every_part_of_the_base(tmp_path, base, edit, names):
    before = base_fingerprint(Checkpoint(base))
    assert fingerprint_differences(before, json.loads(json.dumps(before))) == []
    edit(base)
    differences = fingerprint_differences(before, base_fingerprint(Checkpoint(base)))
    assert differences and all(names in line or "rope" in names for line in differences)


def scale_tensor(base, name):
    shard = Checkpoint(base).info(name).shard
    tensors = load_file(shard)
    tensors[name] = tensors[name] * 2
    save_file(tensors, shard, metadata={"format": "pt"})


def set_config(base, **fields):
    config = json.loads((base / "config.json").read_text())
    config["text_config"].update(fields)
    (base / "config.json").write_text(json.dumps(config))


def test_flat_and_nested_exports_of_one_base_have_one_fingerprint(tmp_path):
    prints = [
        base_fingerprint(Checkpoint(write_base(tmp_path / str(i), nested=nested, prefix=prefix)))
        for i, (nested, prefix) in enumerate([(False, "model."), (False, "model.language_model.")])
    ]
    assert fingerprint_differences(*prints) == []


def test_bases_that_cannot_serve_a_head_are_refused(tmp_path, base):
    head = write_tiny_head(tmp_path / "head", base)
    untied = tmp_path / "untied"
    shutil.copytree(base, untied)
    text = (untied / "model.safetensors.index.json").read_text()
    shard = Checkpoint(untied).info("lm_head.weight").shard
    save_file({n: t for n, t in load_file(shard).items() if n != "lm_head.weight"}, shard)
    index = json.loads(text)
    del index["weight_map"]["lm_head.weight"]
    (untied / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(untied, head, "lm_head")
    refuse(base, tmp_path / "nowhere", "no such folder")
    refuse(base, base, "head folder")
    refuse(base, head, "never written to", out=base / "inside")


def test_other_quantized_bases_are_refused_by_name_for_now(tmp_path, base):
    set_config(base, quantization_config={
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})  # fmt: skip
    refuse(base, write_tiny_head(tmp_path / "head", base), "nvfp4-pack-quantized")


def test_head_metadata_is_checked(tmp_path, base):
    head = write_tiny_head(tmp_path / "head", base)
    good = read_head_metadata(head)
    for change in ({"schema_version": 2}, {"kind": "dspark"}, {"form": "x"}, {"num_layers": 0},
                   {"num_layers": "4"}, {"num_layers": True}, {"num_layers": 10**8},
                   {"quantization": {"producer": 5}}, {"provenance": None}):  # fmt: skip
        (head / "head.json").write_text(json.dumps(good | change))
        with pytest.raises(UserError, match=r"head\.json"):
            read_head_metadata(head)
    (head / "head.json").write_text(json.dumps({k: v for k, v in good.items() if k != "form"}))
    with pytest.raises(UserError, match="no form"):
        read_head_metadata(head)


def test_a_head_of_the_same_base_in_another_quantization_says_what_that_means(tmp_path, base):
    head = write_tiny_head(tmp_path / "head", base)
    set_config(base, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    message = refuse(base, head, "same base in another quantization")
    assert "quantization.algo: head was trained on None, base has NVFP4" in message
    assert "--allow-mismatch, knowing that fewer drafts may be accepted" in message
    assert "another base" in refuse(
        write_base(tmp_path / "other", seed=7), head, "fewer drafts may be accepted"
    )
