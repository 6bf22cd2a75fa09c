"""Names, shapes and the two storages of experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import DENSE, TEXT_CONFIG, random_head, write_base

from graft.errors import UserError
from graft.layout import (
    base_tensor_names,
    count_head_layers,
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
