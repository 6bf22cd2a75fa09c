"""A base's routed experts to NVFP4: their bytes, all else untouched, configs as vLLM reads."""

import json
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from tiny import write_base, write_tiny_head
from training import write_training_base, write_training_data

from graft.errors import UserError
from graft.formats import dequantize_nvfp4
from graft.layout import fuse_experts
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.schemes import precision_problems, read_statement
from graft.verify import verify_graft
from graft.writer import write_graft
from mtp.teacher import Teacher
from quantize.experts import calibration_rows
from quantize.packing import WeightScales, largest, pack
from quantize.trunk import quantize_trunk

LAYOUTS = {
    "nested, per expert, three shards": {},
    "nested, fused": {"experts": "fused"},
    "flat, clean, one file": {"nested": False, "prefix": "model.", "num_shards": 1},
    "with a BF16 head": {"declared": 1, "head_layers": 1},
    "with a head among its tensors": {"declared": 1, "head_layers": 1, "head_place": "mixed"},
    "Qwen3-Next": {"family": "next"},
}


def load_all(checkpoint):
    return {name: checkpoint.load(name) for name in checkpoint.names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_packed_and_nothing_else_changes(tmp_path, layout):
    base = write_base(tmp_path / "base", **LAYOUTS[layout])
    report = quantize_trunk(base, tmp_path / "out")
    before, written = Checkpoint(base), Checkpoint(tmp_path / "out")
    plain = fuse_experts({n: t for n, t in load_all(before).items() if not n.startswith("mtp.")})
    after = load_all(written)
    for name in before.names:
        if ".mlp.experts." not in name or name.startswith("mtp."):
            assert written.info(name).dtype == before.info(name).dtype
            assert torch.equal(after.pop(name), before.load(name)), name
    stacks = {name: t for name, t in plain.items() if ".mlp.experts." in name}
    assert stacks
    for name, stack in stacks.items():
        prefix, _, projection = name.rpartition(".")
        packed = pack(stack, WeightScales(amax=largest(stack)))
        half = stack.shape[1] // 2
        parts = {"down_proj": packed}
        if projection == "gate_up_proj":
            parts = {"gate_proj": packed.rows(0, half), "up_proj": packed.rows(half, 2 * half)}
        for expert in range(stack.shape[0]):
            for part, wanted in parts.items():
                for kind in ("weight", "weight_scale", "weight_scale_2"):
                    found = after.pop(f"{prefix}.{expert}.{part}.{kind}")
                    assert torch.equal(found.float(), getattr(wanted, kind)[expert].float())
    assert not after
    assert report["bytes_after"] < report["bytes_before"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_configs_state_what_is_stored(tmp_path, layout):
    base = write_base(tmp_path / "base", **LAYOUTS[layout])
    quantize_trunk(base, tmp_path / "out")
    written = Checkpoint(tmp_path / "out")
    assert read_statement(written).name == "modelopt W4A16_NVFP4"
    assert precision_problems(written) == []
    file = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    block = written.config["quantization_config"]
    assert file["quantization"]["exclude_modules"] == block["ignore"]
    # The check sees a list that excludes the experts.
    block["ignore"] = [*block["ignore"], "*experts*"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(written.config))
    assert precision_problems(Checkpoint(tmp_path / "out")) != []


def largest_inputs(base, rows):
    """The largest input of each projection in each layer, watched without modelopt."""
    teacher = Teacher.load(base, device="cpu")
    teacher.model.set_experts_implementation("eager")
    owners = {
        getattr(layer.mlp.experts, projection).untyped_storage().data_ptr(): (number, projection)
        for number, layer in enumerate(teacher.model.get_decoder().layers)
        for projection in ("gate_up_proj", "down_proj")
    }
    found = {}
    linear = torch.nn.functional.linear

    def watched(inputs, weight, bias=None):
        owner = owners.get(weight.untyped_storage().data_ptr())
        if owner and inputs.numel():
            found[owner] = max(found.get(owner, 0.0), inputs.abs().max().item())
        return linear(inputs, weight, bias)

    with patch("torch.nn.functional.linear", watched):
        for row in rows:
            teacher.hidden(row)
    return found


def test_w4a4_has_the_largest_inputs_of_its_own_layers(tmp_path):
    base = write_training_base(tmp_path / "base")
    data = write_training_data(tmp_path / "data", base)
    report = quantize_trunk(base, tmp_path / "out", data=data, calibration_tokens=200, device="cpu")
    wanted = largest_inputs(base, calibration_rows(data, 200))
    written = Checkpoint(tmp_path / "out")
    assert read_statement(written).name == "modelopt NVFP4"
    assert precision_problems(written) == []
    assert len(wanted) == 4 and report["scheme"] == "w4a4"
    assert [layer["layer"] for layer in report["coverage"]] == [0, 1]
    scales = [name for name in written.names if name.endswith("input_scale")]
    assert len(scales) == 2 * 4 * 3
    for name in scales:
        layer = int(name.partition("layers.")[2].partition(".")[0])
        projection = "down_proj" if "down_proj" in name else "gate_up_proj"
        amax = wanted[layer, projection]
        assert written.load(name).item() == pytest.approx(amax / 2688, rel=1e-5), name


def test_w4a4_without_data_is_refused(tmp_path):
    base = write_base(tmp_path / "base")
    with pytest.raises(UserError, match="--data"):
        quantize_trunk(base, tmp_path / "out", scheme="w4a4")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["bf16-fused", "nvfp4-modelopt"])
def test_a_head_is_grafted_onto_it_and_proves_itself(tmp_path, form):
    base = write_base(tmp_path / "base", nested=False, prefix="model.")
    quantize_trunk(base, tmp_path / "nvfp4")
    head = write_tiny_head(tmp_path / "head", tmp_path / "nvfp4", form=form)
    out = write_graft(plan_graft(tmp_path / "nvfp4", head), tmp_path / "out").out
    assert precision_problems(Checkpoint(out)) == []
    assert verify_graft(out, tmp_path / "nvfp4").failures == []


def test_the_teacher_reads_what_was_written(tmp_path, random_base):
    quantize_trunk(random_base, tmp_path / "out")
    teacher = Teacher.load(tmp_path / "out", device="cpu")
    written, names = Checkpoint(tmp_path / "out"), dict(teacher.model.named_parameters())
    name = next(n for n in names if n.endswith("mlp.experts.gate_up_proj"))
    stored = next(n for n in written.names if n.endswith("experts.2.gate_proj.weight"))
    parts = [written.load(stored.replace("weight", p)) for p in ("weight", "weight_scale")]
    value = dequantize_nvfp4(*parts, written.load(stored + "_scale_2"))
    assert torch.equal(names[name][2, : value.shape[0]], value)


def test_a_shard_without_experts_is_the_base_s_own_file(tmp_path):
    base = write_base(tmp_path / "base", declared=1, head_layers=1)  # the head has its own
    quantize_trunk(base, tmp_path / "out")
    shards = Checkpoint(base).shards
    for shard, header in shards.items():
        same = (base / shard).samefile(tmp_path / "out" / shard)
        assert same == all(name.startswith("mtp.") for name in header)


def test_what_cannot_be_quantized_is_refused(tmp_path):
    for name, keywords, expected in (
        ("quantized", {"quantized": "modelopt NVFP4"}, "unquantized base"),
        ("dense", {"dense": True}, "routed experts"),
    ):
        base = write_base(tmp_path / name, **keywords)
        with pytest.raises(UserError, match=expected):
            quantize_trunk(base, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_an_expert_without_its_other_half_is_refused(tmp_path):
    base = write_base(tmp_path / "base", num_shards=1, index=False)
    tensors = load_all(Checkpoint(base))
    del tensors[next(n for n in tensors if n.endswith("experts.1.up_proj.weight"))]
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(UserError, match="share a scale"):
        quantize_trunk(base, tmp_path / "out")
