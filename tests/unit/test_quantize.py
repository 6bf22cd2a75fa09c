"""Calibrated and packed heads against the format in plain Python, and the layerwise chain."""

import itertools
from dataclasses import replace

import pytest
import torch
from nvfp4_reference import pack_in_python

from graft.errors import UserError
from graft.formats import dequantize_head, head_tensors
from graft.layout import fuse_experts, split_experts
from graft.manifest import HeadFolder, head_metadata, write_head
from graft.reader import Checkpoint
from mtp.acceptance import continue_prompts, measure
from mtp.data.prompts import Prompt
from mtp.head import load_head, save_head
from mtp.teacher import Teacher
from mtp.warm_start import head_from_base
from quantize.calibration import quantizer_config, require_algorithm
from quantize.experts import calibrate_head, matching_scheme, pack_head
from quantize.gate import replay_head
from quantize.layerwise import load_layer, visits
from quantize.twin import dequantize

ROWS = torch.randint(0, 64, (4, 1, 32), generator=torch.Generator().manual_seed(1)).unbind(0)


@pytest.fixture(scope="module")
def teacher(random_base):
    return Teacher.load(random_base, device="cpu")


def write(head, folder, per_expert=False):
    folder.mkdir()
    save_head(head, folder, base_fingerprint={}, provenance={})
    if per_expert:
        source = HeadFolder(folder)
        tensors = {n: t.contiguous() for n, t in split_experts(source.load_all()).items()}
        write_head(folder, tensors, source.metadata | {"form": "bf16-per-expert"})
    return HeadFolder(folder)


@pytest.fixture(scope="module", params=[False, True], ids=["fused", "per expert"])
def source(request, random_base, tmp_path_factory):
    """A BF16 head of two layers with a block of zeros, an outlier and an expert of zeros."""
    torch.manual_seed(7)
    head = head_from_base(Checkpoint(random_base), 2, "last")
    with torch.no_grad():
        head.layers[0].mlp.gate.weight.normal_(std=0.3)
        experts = head.layers[1].mlp.experts
        experts.gate_up_proj[0, 3, :16] = 0.0
        experts.down_proj[1, 2, 5] = 8.0
        experts.gate_up_proj[2] = 0.0
    return write(head, tmp_path_factory.mktemp("head") / "head", request.param)


@pytest.fixture(scope="module")
def quantized(source, teacher):
    scales, coverage = calibrate_head(source, teacher, ROWS, "w4a4", num_steps=2, runtime="routed")
    return pack_head(source, scales), coverage


def test_names_dtypes_and_shapes_are_a_complete_nvfp4_head(quantized, random_base):
    tensors, _ = quantized
    wanted = head_tensors(Checkpoint(random_base).text_config, 2, "nvfp4-modelopt")
    kinds = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32",
             torch.bfloat16: "BF16"}  # fmt: skip
    assert {n: (kinds[t.dtype], tuple(t.shape)) for n, t in tensors.items()} == wanted


def test_packed_bytes_and_scales_equal_the_plain_rendering(quantized, source):
    tensors, _ = quantized
    original = fuse_experts(source.load_all())
    for layer, expert in itertools.product(range(2), range(4)):
        prefix = f"mtp.layers.{layer}.mlp.experts"
        gate_up = original[f"{prefix}.gate_up_proj"][expert]
        down = original[f"{prefix}.down_proj"][expert]
        matrices = {"gate_proj": gate_up[:16], "up_proj": gate_up[16:], "down_proj": down}
        for name, weight in matrices.items():
            amax = (down if name == "down_proj" else gate_up).abs().max().item() or 1.0
            packed, scales, scale_2 = pack_in_python(weight, amax)
            module = f"{prefix}.{expert}.{name}"
            assert torch.equal(tensors[f"{module}.weight_scale_2"], scale_2), module
            found = tensors[f"{module}.weight_scale"].float().flatten().tolist()
            assert found == scales, module
            assert torch.equal(tensors[f"{module}.weight"], packed), module


def test_input_scales_are_the_largest_inputs_of_each_layer_in_the_chain(
    quantized, source, teacher, monkeypatch
):
    """Watched at `F.linear` of the whole head, without modelopt."""
    tensors, _ = quantized
    head = load_head(source.folder, experts_implementation="eager")
    largest = {}
    linear = torch.nn.functional.linear

    def watched(inputs, weight, bias=None):
        for layer, projection in itertools.product(range(2), ("gate_up_proj", "down_proj")):
            own = getattr(head.layers[layer].mlp.experts, projection)
            if weight.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
                seen = inputs.abs().max().item() if inputs.numel() else 0.0
                key = (layer, projection)
                largest[key] = max(largest.get(key, 0.0), seen)
        return linear(inputs, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    with torch.no_grad():
        for row in ROWS:
            head.chain(teacher.hidden(row).float(), teacher.embed(row).float())
    assert len(largest) == 4
    for (layer, projection), amax in largest.items():
        parts = ("down_proj",) if projection == "down_proj" else ("gate_proj", "up_proj")
        for part in parts:
            found = tensors[f"mtp.layers.{layer}.mlp.experts.0.{part}.input_scale"].item()
            assert found == pytest.approx(amax / 2688, rel=1e-5)
    assert largest[0, "gate_up_proj"] != pytest.approx(largest[1, "gate_up_proj"], rel=1e-3)


def test_experts_that_no_token_reaches_are_named_and_still_have_sound_scales(
    source, teacher, tmp_path
):
    tensors = source.load_all()
    gate = tensors["mtp.layers.1.mlp.gate.weight"]
    gate[:2] += 100 * teacher.hidden(ROWS[0])[0].mean(0).sign().to(gate)
    tensors["mtp.layers.1.mlp.gate.weight"] = gate
    folder = tmp_path / "head"
    folder.mkdir()
    write_head(folder, tensors, source.metadata)
    scales, coverage = calibrate_head(
        HeadFolder(folder), teacher, ROWS[:1], "w4a4", num_steps=2, runtime="routed"
    )
    assert coverage[1]["never_routed"] and coverage[1]["steps"] == [1]
    packed = pack_head(HeadFolder(folder), scales)
    for expert in coverage[1]["never_routed"]:
        for part in ("gate_proj", "up_proj", "down_proj"):
            for scale in ("weight_scale", "weight_scale_2", "input_scale"):
                value = packed[f"mtp.layers.1.mlp.experts.{expert}.{part}.{scale}"].float()
                assert value.isfinite().all() and (value > 0).all()


def test_bug_B15_only_the_experts_change(quantized, source):
    tensors, _ = quantized
    original, twin = fuse_experts(source.load_all()), fuse_experts(dequantize_head(tensors))
    assert twin.keys() == original.keys()
    for name, tensor in twin.items():
        difference = (tensor.float() - original[name].float()).norm() / original[name].norm()
        if ".experts." in name:
            assert 0.01 < difference < 0.2, name
        else:
            assert torch.equal(tensor, original[name]), name


def test_w4a16_is_the_same_without_input_scales_and_needs_no_data(quantized, source, teacher):
    scales, _ = calibrate_head(source, teacher, [], "w4a16", num_steps=2, runtime="routed")
    tensors = pack_head(source, scales)
    whole = {n: t for n, t in quantized[0].items() if not n.endswith("input_scale")}
    assert tensors.keys() == whole.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.float(), whole[name].float()), name


def test_w4a4_without_calibration_data_is_refused(source, teacher):
    with pytest.raises(UserError, match="input_scale"):
        calibrate_head(source, teacher, [], "w4a4", num_steps=2, runtime="routed")


@pytest.mark.parametrize(
    ("runtime", "num_steps"), [("routed", 2), ("routed", 5), ("routed", 1), ("stock", 4)]
)
def test_visits_compute_what_the_whole_chain_does(source, teacher, runtime, num_steps):
    rows = [ROWS[0], ROWS[1][:, :3], ROWS[2][:, :1]]
    head = load_head(source.folder, experts_implementation="eager")
    found = [[] for _ in rows]
    layers = []
    states = [teacher.hidden(row) for row in rows]
    turns = visits(teacher, rows, states, 2, num_steps, stock=runtime == "stock", idle_layers=True)
    for visit in turns:
        visit.run(load_layer(source, visit.layer, torch.device("cpu")))
        layers.append(visit.layer)
        if visit.steps:
            for row, outputs in enumerate(visit.outputs):
                found[row] += outputs
    assert set(layers) == {0, 1}
    with torch.no_grad():
        for row, outputs in zip(rows, found, strict=True):
            states, embeddings = teacher.hidden(row).float(), teacher.embed(row).float()
            wanted = head.chains(runtime, states, embeddings, num_steps)[runtime]
            assert len(outputs) == len(wanted)
            for mine, theirs in zip(outputs, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("runtime", ["routed", "stock"])
def test_replay_by_layers_counts_what_measure_counts(few_words_base, tmp_path, runtime):
    teacher = Teacher.load(few_words_base, device="cpu")
    head = head_from_base(Checkpoint(few_words_base), 2, "last")
    source = write(head, tmp_path / "head")
    prompts = [
        Prompt(id=str(n), category="ab"[n % 2], token_ids=tuple(range(n, n + 5))) for n in range(3)
    ]
    text = continue_prompts(teacher, prompts, 20, 3)
    whole = measure(teacher, load_head(source.folder), text, num_steps=3, runtime=runtime)
    found = replay_head(teacher, source, text, 3, runtime)
    assert found.metrics == whole
    assert whole["accepted_per_position"][0] > 0
    other = replay_head(teacher, source, replace(text, num_tokens=10), 3, runtime)
    assert other.metrics["num_drafts"] < whole["num_drafts"]


def test_algorithms_that_need_cuda_are_refused_on_a_cpu():
    require_algorithm("max", torch.device("cpu"))
    with pytest.raises(UserError, match="CUDA device for --algorithm mse"):
        require_algorithm("mse", torch.device("cpu"))


def test_modelopt_s_own_presets_are_what_the_algorithms_say():
    import modelopt.torch.quantization as mtq

    for algorithm, preset in (
        ("max", mtq.NVFP4_DEFAULT_CFG),
        ("mse", mtq.NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG),
        ("local_hessian", mtq.NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG),
        ("four_over_six", mtq.NVFP4_FOUR_OVER_SIX_CFG),
    ):
        ours = quantizer_config("w4a4", algorithm)
        method = preset["algorithm"]
        assert ours["algorithm"] in (method, {"method": method} if isinstance(method, str) else 0)
        weights = next(
            q["cfg"] for q in preset["quant_cfg"]
            if "weight_quantizer" in q["quantizer_name"] and q.get("cfg")
        )  # fmt: skip
        assert ours["quant_cfg"][1]["cfg"]["block_sizes"] == {
            key: (4, 3) if key == "scale_bits" else value
            for key, value in weights["block_sizes"].items()
        }


def test_the_scheme_follows_the_base(tmp_path):
    from tiny import write_base

    for number, (quantized, wanted) in enumerate(
        {
            None: "w4a4",
            "modelopt NVFP4": "w4a4",
            "modelopt W4A16_NVFP4": "w4a16",
            "compressed-tensors W4A4": "w4a4",
            "compressed-tensors W4A16": "w4a16",
            "modelopt MIXED_PRECISION": "w4a16",
            "FP8 block": "w4a4",
        }.items()
    ):
        base = write_base(tmp_path / str(number), quantized=quantized)
        assert matching_scheme(Checkpoint(base)) == wanted, quantized


def test_dequantize_gives_the_twin_and_refuses_a_bf16_head(quantized, source, tmp_path):
    tensors, _ = quantized
    folder = tmp_path / "nvfp4"
    folder.mkdir()
    facts = {k: source.metadata[k] for k in ("num_layers", "text_config", "base_fingerprint")}
    metadata = head_metadata(form="nvfp4-modelopt", provenance={}, **facts)
    write_head(folder, tensors, metadata)
    dequantize(folder, tmp_path / "twin")
    twin = HeadFolder(tmp_path / "twin")
    for name, tensor in dequantize_head(tensors).items():
        assert torch.equal(twin.load(name), tensor), name
    with pytest.raises(UserError, match="NVFP4"):
        dequantize(tmp_path / "twin", tmp_path / "out")
    assert not (tmp_path / "out").exists()
