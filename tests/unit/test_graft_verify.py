"""Verify: it passes what graft wrote (see the writer's tests) and catches every damage."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import write_base, write_tiny_head

from graft.errors import UserError
from graft.index import INDEX_NAME
from graft.plan import plan_graft
from graft.verify import verify_graft
from graft.writer import write_graft


@pytest.fixture(scope="module")
def grafted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    base = write_base(folder / "base", declared=1, head_layers=1, head_place="mixed")
    head = write_tiny_head(folder / "head", base, form="nvfp4-modelopt")
    out = write_graft(plan_graft(base, head), folder / "out", link="copy").out
    assert verify_graft(out, base).ok
    return base, out


@pytest.fixture
def damaged(grafted, tmp_path):
    """A copy that a test may damage, without its manifest: the other checks must see it."""
    base, out = grafted
    shutil.copytree(out, tmp_path / "copy")
    (tmp_path / "copy" / "graft.manifest.json").unlink()
    report = verify_graft(tmp_path / "copy", base)
    assert report.ok and "skip" in {check.status for check in report.checks}
    return base, tmp_path / "copy"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_change_of_any_one_byte_of_a_shard_is_caught(grafted, data):
    _, out = grafted
    shard = data.draw(st.sampled_from(sorted(out.glob("*.safetensors"))))
    content = bytearray(shard.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    original = bytes(content)
    content[position] ^= data.draw(st.integers(1, 255))
    try:
        shard.write_bytes(content)
        report = verify_graft(out)
        assert not report.ok
        assert any(shard.name in failure or "mtp." in failure for failure in report.failures)
    finally:
        shard.write_bytes(original)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "hf_quant_config.json"])
def test_a_change_of_any_other_file_is_caught(grafted, name):
    _, out = grafted
    original = (out / name).read_bytes()
    try:
        (out / name).write_bytes(original + b"\n")
        assert f"files match the manifest: {name} has changed" in verify_graft(out).failures[0]
        (out / name).unlink()
        assert not verify_graft(out).ok
    finally:
        (out / name).write_bytes(original)


def edit_head(out, change):
    shard = out / "model_mtp.safetensors"
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def index_without(out, *names):
    def change(index):
        for name in names:
            del index["weight_map"][name]

    edit_json(out / INDEX_NAME, change)


EXPERT = "mtp.layers.3.mlp.experts.2"


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("finite", lambda t: t["mtp.layers.1.input_layernorm.weight"].fill_(float("nan"))),
        ("finite", lambda t: t[f"{EXPERT}.up_proj.input_scale"].zero_()),
        ("finite", lambda t: t[f"{EXPERT}.up_proj.weight_scale_2"].mul_(2)),
        ("complete", lambda t: t.update({"mtp.norm.weight": torch.ones(31).bfloat16()})),
        ("complete", lambda t: t.update({"mtp.norm.weight": torch.ones(32)})),
        ("quantization", lambda t: t.update(
            {"mtp.layers.0.self_attn.o_proj.weight": torch.ones(32, 16, dtype=torch.uint8)})),
    ],
)  # fmt: skip
def test_damaged_heads_fail_the_check_that_names_them(damaged, check, change):
    base, out = damaged
    edit_head(out, change)
    failed = {c.name for c in verify_graft(out, base).checks if c.status == "fail"}
    assert any(check in name for name in failed)


def test_bug_A2_and_A9_missing_head_tensors(damaged):
    _, out = damaged
    name = f"{EXPERT}.down_proj.input_scale"
    edit_head(out, lambda tensors: tensors.pop(name))
    index_without(out, name)
    assert any(f"{name} is missing" in failure for failure in verify_graft(out).failures)
    (out / "model_mtp.safetensors").unlink()
    edit_json(out / INDEX_NAME, lambda v: v.update(weight_map={
        k: s for k, s in v["weight_map"].items() if not k.startswith("mtp.")}))  # fmt: skip
    assert any("declared 4 MTP layers, found none" in f for f in verify_graft(out).failures)


@pytest.mark.parametrize(
    ("file", "change", "check"),
    [
        (INDEX_NAME, lambda v: v["metadata"].update(total_size=1), "index"),
        (INDEX_NAME, lambda v: v["weight_map"].pop("mtp.fc.weight"), "index"),
        ("config.json", lambda v: v["text_config"].update(mtp_num_hidden_layers=1), "config"),
        ("config.json", lambda v: v["quantization_config"]["ignore"].append("mtp*"), "quantiz"),
        ("config.json", lambda v: v.pop("quantization_config"), "quantization"),
        ("hf_quant_config.json", lambda v: v["quantization"]["exclude_modules"].pop(), "quantiz"),
    ],
)
def test_configs_and_index_that_disagree_with_the_tensors(damaged, file, change, check):
    base, out = damaged
    edit_json(out / file, change)
    if file == "config.json" and check == "quantization":
        (out / "hf_quant_config.json").unlink()
    failed = {c.name for c in verify_graft(out, base).checks if c.status == "fail"}
    assert any(check in name for name in failed), failed


def test_a_changed_base_tensor_is_named(damaged):
    base, out = damaged
    shard = out / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1
    save_file(tensors, shard, metadata={"format": "pt"})
    assert verify_graft(out).ok  # without base and manifest nothing is known about it
    failures = verify_graft(out, base).failures
    assert failures == [f"base tensors are byte-identical: {name} has other bytes"]


def test_a_broken_folder_is_a_failed_check_not_a_traceback(tmp_path):
    (tmp_path / "config.json").write_text("{")
    report = verify_graft(tmp_path)
    assert not report.ok and "config.json" in report.failures[0]
    assert report.as_dict()["ok"] is False


def test_a_missing_folder_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        verify_graft(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["x" * 300, "../head/head.json", "\x1b[31m"])
def test_a_manifest_with_names_of_no_file_is_a_failed_check(grafted, damaged, name):
    folder = damaged[1]
    manifest = json.loads((grafted[1] / "graft.manifest.json").read_text())
    manifest["files"][name] = {"sha256": "0", "bytes": 1, "storage": "copy"}
    (folder / "graft.manifest.json").write_text(json.dumps(manifest))
    (failure,) = verify_graft(folder).failures
    assert "a whole manifest" in failure
