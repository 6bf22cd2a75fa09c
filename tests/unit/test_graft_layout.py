"""Names, shapes and the two storages of experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import DENSE, NEXT, TEXT_CONFIG, random_head, write_base

from graft.config_patch import with_layer_count
from graft.errors import UserError
from graft.layout import (
    base_tensor_names,
    count_head_layers,
    declared_layers,
    fuse_experts,
    head_tensor_shapes,
    split_experts,
)
from graft.reader import Checkpoint

QWEN_35B = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "attn_output_gate": True, "num_experts": 256, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "experts", "tensors"), [(1, "fused", 19), (4, "fused", 64), (4, "per_expert", 3128)]
)
def test_shapes_of_the_published_head(layers, experts, tensors):
    shapes = head_tensor_shapes(QWEN_35B, layers, experts)
    assert len(shapes) == tensors
    size = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    assert size == {1: 1_689_281_536, 4: 6_706_757_632}[layers]
    assert shapes["mtp.layers.0.self_attn.q_proj.weight"] == (8192, 2048)


def test_a_dense_head_has_15_tensors():
    assert len(head_tensor_shapes(TEXT_CONFIG | DENSE, 1)) == 15


def test_missing_sizes_are_user_errors():
    with pytest.raises(UserError, match="head_dim"):
        head_tensor_shapes({k: v for k, v in QWEN_35B.items() if k != "head_dim"}, 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_fuse_and_split_are_exact_inverses_over_every_key(layers, experts, hidden, width):
    text = TEXT_CONFIG | {
        "hidden_size": hidden, "moe_intermediate_size": width, "num_experts": experts,
        "shared_expert_intermediate_size": width,
    }  # fmt: skip
    fused = random_head(text, layers, "bf16-fused")
    split = split_experts(fused)
    assert {n: tuple(t.shape) for n, t in split.items()} == head_tensor_shapes(
        text, layers, "per_expert"
    )
    again = fuse_experts(split)
    assert again.keys() == fused.keys() == head_tensor_shapes(text, layers, "fused").keys()
    assert all(torch.equal(again[name], fused[name]) for name in fused)
    twice = split_experts(again)
    assert all(torch.equal(twice[name], split[name]) for name in split)


def test_bug_C4_gate_rows_come_first_and_nothing_is_transposed():
    text = TEXT_CONFIG | {"hidden_size": 5, "moe_intermediate_size": 3, "num_experts": 3}
    fused = random_head(text, 1, "bf16-fused")
    split = split_experts(fused)
    name = "mtp.layers.0.mlp.experts"
    assert torch.equal(split[f"{name}.2.gate_proj.weight"], fused[f"{name}.gate_up_proj"][2, :3])
    assert torch.equal(split[f"{name}.2.up_proj.weight"], fused[f"{name}.gate_up_proj"][2, 3:])
    assert torch.equal(split[f"{name}.1.down_proj.weight"], fused[f"{name}.down_proj"][1])


def test_an_incomplete_set_of_experts_is_named():
    split = split_experts(random_head(TEXT_CONFIG, 1, "bf16-fused"))
    del split["mtp.layers.0.mlp.experts.1.up_proj.weight"]
    with pytest.raises(UserError, match=r"experts\.1\.up_proj"):
        fuse_experts(split)


def test_layer_count_is_the_highest_number_plus_one():
    assert count_head_layers(["mtp.fc.weight", "model.layers.7.x"]) == 0
    assert count_head_layers(["mtp.layers.0.x", "mtp.layers.11.x", "mtp.layers.2.y"]) == 12


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_bug_C5_trunk_prefixes(tmp_path, prefix):
    names = base_tensor_names(Checkpoint(write_base(tmp_path / "b", prefix=prefix)))
    assert names.embed == f"{prefix}embed_tokens.weight"
    assert names.final_norm == f"{prefix}norm.weight"
    assert names.layer_prefix == f"{prefix}layers."
    assert names.lm_head == "lm_head.weight"


def test_tied_bases_have_no_lm_head_and_untied_ones_need_it(tmp_path):
    tied = write_base(tmp_path / "tied", tied=True)
    assert base_tensor_names(Checkpoint(tied)).lm_head is None
    text = (tied / "config.json").read_text()
    (tied / "config.json").write_text(text.replace(": true", ": false"))
    with pytest.raises(UserError, match="lm_head"):
        base_tensor_names(Checkpoint(tied))


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"model_type": "qwen3_5_moe_text"}, None),
        ({"model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 2}, 2),
        ({"model_type": "qwen3_5_moe", "text_config": {"mtp_num_hidden_layers": 3}}, 3),
        ({"model_type": "qwen3_5", "mtp_num_hidden_layers": 1,
          "text_config": {"mtp_num_hidden_layers": 4}}, 1),  # vLLM looks at the top first
        ({"model_type": "qwen3_next"}, 1),
        ({"model_type": "qwen3_next", "num_nextn_predict_layers": 4}, 4),
        ({"model_type": "qwen3_next", "mtp_num_hidden_layers": 4}, 1),
    ],
)  # fmt: skip
def test_bug_C5_the_declared_count_is_read_where_vllm_reads_it(config, declared):
    assert declared_layers(config) == declared
    assert declared_layers(with_layer_count(config, 5)) == 5


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [0, 2]}, {0, 2}),
        ({"decoder_sparse_step": 2}, {0, 2}),
        ({"decoder_sparse_step": 4, "mlp_only_layers": [3]}, {0, 1, 2, 3}),
        ({"model_type": "qwen3_5_moe_text", "mlp_only_layers": [0]}, set()),
    ],
)
def test_which_qwen3_next_mtp_layers_vllm_builds_without_experts(changes, dense):
    """`Qwen3NextDecoderLayer` (vLLM 0.32) asks about the MTP layer's own number, from 0."""
    names = head_tensor_shapes(TEXT_CONFIG | NEXT | changes, 4)
    for layer in range(4):
        assert (f"mtp.layers.{layer}.mlp.down_proj.weight" in names) == (layer in dense)
        assert (f"mtp.layers.{layer}.mlp.experts.down_proj" in names) == (layer not in dense)


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_lists_that_count_the_head_follow_its_layers(num_layers):
    text = {"num_hidden_layers": 3, "mtp_num_hidden_layers": 1, "eos_token_id": [1, 2, 3, 4],
            "layer_types": ["l", "l", "f", "f"], "limits": [1, 2, 3, 9]}  # fmt: skip
    new = with_layer_count({"model_type": "qwen3_5_moe", "text_config": text}, num_layers)
    assert new["text_config"] == text | {
        "mtp_num_hidden_layers": num_layers, "limits": [1, 2, 3] + [9] * num_layers,
        "layer_types": ["l", "l", "f"] + ["f"] * num_layers,
    }  # fmt: skip
    assert text["limits"] == [1, 2, 3, 9]
    text.pop("mtp_num_hidden_layers")  # no head declared: no list can count one
    again = with_layer_count({"model_type": "qwen3_5_moe", "text_config": text}, num_layers)
    assert again["text_config"]["limits"] == [1, 2, 3, 9]


def test_bug_C1_both_storages_of_one_head_are_the_same_head():
    """3.5 stores experts one by one, 3.6 fused; read either way, the tensors are equal."""
    fused = random_head(TEXT_CONFIG, 2, "bf16-fused")
    split = {name: tensor.clone() for name, tensor in split_experts(fused).items()}
    assert fused.keys() != split.keys()
    again = fuse_experts(split)
    assert all(torch.equal(again[name], fused[name]) for name in fused)
    split["mtp.layers.1.mlp.experts.2.up_proj.weight"] += 1  # negative control
    changed = fuse_experts(split)
    assert [n for n in fused if not torch.equal(changed[n], fused[n])] == [
        "mtp.layers.1.mlp.experts.gate_up_proj"
    ]
