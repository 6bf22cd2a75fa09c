"""Inspect: what a checkpoint is, what vLLM will do with it, and every problem with its name."""

from __future__ import annotations

import json
import math
import struct
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BASES, random_head, write_base, write_tiny_head
from tiny_quantized import QUANTIZED, quantize_matrix
from typer.testing import CliRunner

from graft.formats import head_tensors
from graft.index import INDEX_NAME
from graft.inspect import FAMILIES, inspect_checkpoint
from graft.plan import plan_graft
from graft.reader import SUPPORTED_MODEL_TYPES
from graft.writer import write_graft
from mtp.cli import app


def whats(inspection, severity="error"):
    return [p.what for p in inspection.problems if p.severity == severity]


def edit_json(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def test_every_supported_family_has_a_name():
    assert set(FAMILIES) == set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize("name", BASES)
def test_every_layout_is_described_and_its_problems_are_the_expected_ones(tmp_path, name):
    row = BASES[name]
    inspection = inspect_checkpoint(write_base(tmp_path / "base", **row))
    expected = []
    if row.get("declared") and not row.get("head_layers"):
        expected = [f"declared {row['declared']} MTP layers, found none; mtp graft adds a head"]
    if row.get("head_place") == "standalone":
        expected = ["mtp.safetensors holds a head and is not in the index: vLLM will not read it"]
    assert whats(inspection) == expected and not whats(inspection, "warning")
    assert inspection.servable == (not expected)
    layers = row.get("head_layers", 0)
    assert (inspection.head.num_layers if inspection.head else 0) == layers
    assert inspection.head is None or inspection.head.complete
    dense = "dense" in row
    assert inspection.trunk_experts == (
        "none" if dense else "fused" if row.get("experts") == "fused" else "per expert"
    )
    assert inspection.as_dict()["schema_version"] == 1
    json.dumps(inspection.as_dict())
    if "Qwen3-Next" in name:
        assert inspection.family == "Qwen3-Next" and inspection.config == "flat"
        assert not inspection.head or inspection.speculation.head_class == "Qwen3NextMTP"


@pytest.mark.parametrize(
    ("declared", "layers", "what"),
    [
        (4, 0, "declared 4 MTP layers, found none; mtp graft adds a head"),
        (4, 2, "mtp_num_hidden_layers is 4, found 2 MTP layers"),
        (None, 1, "mtp_num_hidden_layers is None, found 1 MTP layers"),
    ],
)
def test_bug_A2_declared_and_found_layers(tmp_path, declared, layers, what):
    base = write_base(tmp_path / "base", declared=declared, head_layers=layers)
    assert whats(inspect_checkpoint(base)) == [what]


def test_bug_A3_all_missing_names_are_in_the_json_and_ten_in_the_text(tmp_path):
    base = write_base(tmp_path / "base", declared=2, head_layers=2, head_form="bf16-per-expert")
    shard = base / "model-00004-of-00004.safetensors"
    tensors = load_file(shard)
    gone = sorted(name for name in tensors if name.startswith("mtp.layers.1.mlp.experts."))
    save_file({n: t for n, t in tensors.items() if n not in gone}, shard)

    def drop(index):
        for name in gone:
            del index["weight_map"][name]

    edit_json(base / INDEX_NAME, drop)
    inspection = inspect_checkpoint(base)
    (problem,) = (p for p in inspection.problems if p.severity == "error")
    assert problem.details == tuple(f"{name} is missing" for name in gone) and len(gone) == 12
    assert "and 2 more" in inspection.as_text() and not inspection.head.complete


def test_bugs_E1_and_E2_files_and_index_that_disagree_are_warnings(tmp_path):
    base = write_base(tmp_path / "base", declared=1, head_layers=1)
    save_file({"other": torch.ones(1)}, base / "model-mtp-of-00005.safetensors")

    def forget(index):
        del index["weight_map"]["mtp.fc.weight"]
        index["metadata"]["total_size"] = 7

    edit_json(base / INDEX_NAME, forget)
    inspection = inspect_checkpoint(base)
    warnings = whats(inspection, "warning")
    assert inspection.servable and len(warnings) == 3
    assert "model-mtp-of-00005.safetensors is not in the index" in warnings[0]
    assert "does not list" in warnings[1] and "total_size is 7" in warnings[2]


def test_bug_D1_norms_with_a_baked_in_one(tmp_path):
    base = write_base(tmp_path / "base", declared=2, head_layers=2)
    assert inspect_checkpoint(base).servable
    shard = base / "model-00004-of-00004.safetensors"
    tensors = load_file(shard)
    for layer in (0, 1):
        name = f"mtp.layers.{layer}.input_layernorm.weight"
        tensors[name] = (1 + 0.1 * torch.randn(32)).bfloat16()
    save_file(tensors, shard)
    (what,) = whats(inspect_checkpoint(base))
    assert "means near 1" in what


def test_bugs_A10_and_A11_what_vllm_runs_and_how_many_tokens_it_takes(tmp_path):
    four = inspect_checkpoint(write_base(tmp_path / "four", declared=4, head_layers=4))
    assert four.speculation.stock == "layer 0 at every position"
    assert four.speculation.with_plugin == "each layer at its own position"
    assert "1 to 4, or a multiple of 4" in four.as_text()
    one = inspect_checkpoint(write_base(tmp_path / "one", declared=1, head_layers=1))
    assert one.speculation.with_plugin == "the same" and one.speculation.max_free == 1
    following = inspect_checkpoint(
        write_base(tmp_path / "next", family="next", declared=4, head_layers=4)
    )
    assert following.speculation.with_plugin == "the same" and following.servable
    assert "no vLLM runs more than layer 0" in whats(following, "warning")[0]
    base = write_base(tmp_path / "base", family="next")
    for layers, said in ((4, True), (1, False)):
        head = write_tiny_head(tmp_path / f"head{layers}", base, num_layers=layers)
        result = write_graft(plan_graft(base, head), tmp_path / f"out{layers}")
        assert ("warning: no vLLM runs" in result.as_text()) == said


def test_an_nvfp4_graft_is_described_and_its_exclusion_list_checked(tmp_path):
    base = write_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt")
    out = write_graft(plan_graft(base, head), tmp_path / "out").out
    inspection = inspect_checkpoint(out)
    assert inspection.servable and inspection.grafted and not inspection.problems
    assert inspection.head.form == "nvfp4-modelopt" and inspection.bytes_by_dtype["U8"] > 0

    def exclude_all(config):
        config["quantization_config"]["ignore"].append("mtp*")

    edit_json(out / "config.json", exclude_all)
    (problem, *_) = inspect_checkpoint(out).problems
    assert problem.severity == "error" and "quantization config" in problem.what


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_bases_and_grafts_on_them_have_no_errors(tmp_path, name):
    base = write_base(tmp_path / "base", quantized=name)
    inspection = inspect_checkpoint(base)
    assert not inspection.problems and inspection.quantization
    form = "bf16-fused" if "FP8" in name else "nvfp4-modelopt"
    head = write_tiny_head(tmp_path / "head", base, form=form)
    out = write_graft(plan_graft(base, head), tmp_path / "out").out
    inspection = inspect_checkpoint(out)
    assert not inspection.problems and inspection.head.complete


def test_the_fp8_head_that_qwen_ships_is_whole(tmp_path):
    base = write_base(tmp_path / "base", quantized="FP8 block", declared=1)
    config = json.loads((base / "config.json").read_text())["text_config"]
    head = random_head(config, 1, "bf16-per-expert")
    stored = {}
    for name, tensor in head.items():
        module = name.removesuffix(".weight")
        is_fp8 = "_proj" in name
        stored |= quantize_matrix(module, tensor, "fp8-block") if is_fp8 else {name: tensor}
    save_file(stored, base / "mtp.safetensors")
    index = base / INDEX_NAME
    gates = ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]

    def list_gates(config):
        config["quantization_config"]["modules_to_not_convert"] += gates

    edit_json(base / "config.json", list_gates)

    def add(value):
        value["weight_map"] |= dict.fromkeys(stored, "mtp.safetensors")
        value["metadata"]["total_size"] += sum(t.nbytes for t in stored.values())

    edit_json(index, add)
    inspection = inspect_checkpoint(base)
    assert inspection.head.form == "fp8-block" and inspection.head.complete
    assert not inspection.problems
    del stored["mtp.layers.0.mlp.experts.1.up_proj.weight"]  # negative control
    save_file(stored, base / "mtp.safetensors")
    edit_json(index, lambda v: v["weight_map"].pop("mtp.layers.0.mlp.experts.1.up_proj.weight"))
    assert not inspect_checkpoint(base).head.complete


def test_unsupported_folders_are_described_too(tmp_path):
    base = write_base(tmp_path / "base", head_layers=1, declared=1)
    edit_json(base / "config.json", lambda config: config.update(model_type="llama"))
    inspection = inspect_checkpoint(base)
    assert not inspection.servable and "'llama'" in whats(inspection)[0]
    mlx = inspect_checkpoint(write_base(tmp_path / "mlx", prefix="language_model.model."))
    assert "MLX" in whats(mlx)[0] and mlx.trunk_prefix is None


def test_the_command_exits_1_for_errors_only(tmp_path):
    sound = write_base(tmp_path / "sound", declared=1, head_layers=1)
    save_file({"other": torch.ones(1)}, sound / "extra.safetensors")
    result = CliRunner().invoke(app, ["inspect", str(sound)])
    assert result.exit_code == 0 and "warning: extra" in result.output
    assert "routing:" in result.output
    empty = write_base(tmp_path / "empty", declared=1)
    result = CliRunner().invoke(app, ["inspect", str(empty), "--json"])
    found = json.loads(result.output)
    assert result.exit_code == 1 and not found["servable"] and found["schema_version"] == 1


def test_many_tensors_are_answered_for_in_seconds(tmp_path):
    """12,000 head tensors; a checkpoint of 123,083 took 5.6 CPU-seconds."""
    base = write_base(tmp_path / "base", text={"num_experts": 250}, experts="fused", declared=4)
    config = json.loads((base / "config.json").read_text())["text_config"]
    header, position, widths = {}, 0, {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
    for name, (dtype, shape) in head_tensors(config, 4, "nvfp4-modelopt").items():
        end = position + math.prod(shape) * widths[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    with (base / "mtp.safetensors").open("wb") as file:  # sparse: only the header is real
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + position)
    started = time.process_time()
    inspection = inspect_checkpoint(base)
    assert inspection.head.num_tensors > 12_000 and inspection.head.complete
    assert time.process_time() - started < 5
