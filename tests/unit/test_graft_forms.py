"""The head in the form that the base's quantization can express, and what the configs say then."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import QUANTIZED, TEXT_CONFIG, write_base, write_tiny_head

from graft import convert
from graft.errors import UserError
from graft.extract import extract_head
from graft.formats import FORMS, dequantize_head, head_form, head_tensors
from graft.manifest import HeadFolder
from graft.plan import plan_graft
from graft.reader import Checkpoint, TensorStore
from graft.verify import verify_graft
from graft.writer import write_graft, write_shard

# What an NVFP4 head of modelopt becomes on each base.
WRITTEN = {
    "modelopt NVFP4": "nvfp4-modelopt",
    "modelopt NVFP4, config.json alone": "nvfp4-modelopt",
    "modelopt NVFP4, hf_quant_config.json alone": "nvfp4-modelopt",
    "modelopt NVFP4, no input activations": "nvfp4-modelopt-w4a16",
    "modelopt W4A16_NVFP4": "nvfp4-modelopt-w4a16",
    "modelopt MIXED_PRECISION": "nvfp4-modelopt-w4a16",
    "modelopt MIXED_PRECISION, layers in hf_quant_config.json": "nvfp4-modelopt",
    "compressed-tensors W4A4": "nvfp4-compressed-tensors",
    "compressed-tensors W4A16": "nvfp4-compressed-tensors-w4a16",
    "FP8 block": "bf16-per-expert",
}
LAYOUTS = {"nested": {}, "flat": {"nested": False, "prefix": "model."}}


def grafted(tmp_path, name, form, tensors=None, **layout):
    base = write_base(tmp_path / "base", quantized=name, declared=1, **layout)
    head = write_tiny_head(tmp_path / "head", base, form=form, tensors=tensors)
    result = write_graft(plan_graft(base, head), tmp_path / "out")
    return base, head, result.out


def two_files(row):
    return "algo" in row and row.get("block", True) and row.get("file", True)


def blocks(folder):
    config = json.loads((folder / "config.json").read_text())
    file = folder / "hf_quant_config.json"
    return config.get("quantization_config"), json.loads(
        file.read_text()
    ) if file.exists() else None


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(
    ("form", "layout"),
    [("bf16-fused", "nested"), ("bf16-per-expert", "flat"), ("nvfp4-modelopt", "nested"),
     ("nvfp4-modelopt", "flat")])  # fmt: skip
def test_every_quantized_base_takes_every_head_in_the_form_it_can_state(
    tmp_path, name, form, layout
):
    base, _, out = grafted(tmp_path, name, form, **LAYOUTS[layout])
    report = verify_graft(out, base)
    assert report.ok, report.as_text()
    assert [check.status for check in report.checks] == ["pass"] * 8
    assert report.form == (WRITTEN[name] if form == "nvfp4-modelopt" else form)
    block, file = blocks(out)
    before = blocks(base)
    assert (block is None, file is None) == (before[0] is None, before[1] is None)


def test_compressed_tensors_names_hold_the_same_bytes_and_reciprocal_scales(tmp_path):
    _, head, out = grafted(tmp_path, "compressed-tensors W4A4", "nvfp4-modelopt")
    source, written = HeadFolder(head), Checkpoint(out)
    name = "mtp.layers.3.mlp.experts.2.down_proj"
    same = {"weight": "weight_packed", "weight_scale": "weight_scale"}
    for old, new in same.items():
        assert source.digest(f"{name}.{old}") == written.digest(f"{name}.{new}")
    for old, new in {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"
                     }.items():  # fmt: skip
        info = written.info(f"{name}.{new}")
        assert (info.dtype, info.shape) == ("F32", (1,))
        wanted = 1 / source.load(f"{name}.{old}").item()
        assert written.load(f"{name}.{new}").item() == pytest.approx(wanted, rel=1e-7)
    assert source.digest("mtp.fc.weight") == written.digest("mtp.fc.weight")


@pytest.mark.parametrize("name", ["compressed-tensors W4A4", "compressed-tensors W4A16"])
def test_bug_B14_dequantized_both_ways_is_the_same(tmp_path, name):
    _, head, out = grafted(tmp_path, name, "nvfp4-modelopt")
    source = dequantize_head(HeadFolder(head).load_all())
    opened = Checkpoint(out)
    stored = {n: opened.load(n) for n in opened.head_names}
    written = dequantize_head(stored)
    assert source.keys() == written.keys()
    for tensor in source:
        left, right = source[tensor].float(), written[tensor].float()
        # Twice rounded in F32: a value may fall into the next BF16, 2^-8 away, never further.
        assert torch.allclose(left, right, rtol=2**-7, atol=0), tensor
    # Negative control: the reciprocal forgotten is seen by the numbers, and by verify.
    scales = [n for n in stored if n.endswith("weight_global_scale")]
    wrong = dequantize_head(stored | {n: 1 / stored[n] for n in scales})
    expert = "mtp.layers.0.mlp.experts.0.up_proj.weight"
    assert wrong[expert].abs().max() > 1e3 * source[expert].abs().max()


def test_bug_B14_a_scale_stored_as_its_reciprocal_fails_verify(tmp_path):
    _, _, out = grafted(tmp_path, "compressed-tensors W4A4", "nvfp4-modelopt")
    shard = out / "model_mtp.safetensors"
    tensors = load_file(shard)
    name = "mtp.layers.1.mlp.experts.0.down_proj.weight_global_scale"
    save_file(tensors | {name: 1 / tensors[name]}, shard, metadata={"format": "pt"})
    assert any(name in f and "reciprocal" in f for f in verify_graft(out).failures)


@pytest.mark.parametrize(
    "name", ["modelopt W4A16_NVFP4", "modelopt NVFP4, no input activations",
             "compressed-tensors W4A16", "modelopt MIXED_PRECISION"])  # fmt: skip
def test_w4a16_has_no_input_scales(tmp_path, name):
    _, head, out = grafted(tmp_path, name, "nvfp4-modelopt")
    assert not [n for n in Checkpoint(out).head_names if "input" in n and "scale" in n]
    assert any(n.endswith("input_scale") for n in HeadFolder(head).names)  # negative control


def test_an_nvfp4_head_on_an_fp8_base_is_the_dequantized_twin_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "ROWS_BYTES", 200)  # several blocks of rows a matrix
    _, head, out = grafted(tmp_path, "FP8 block", "nvfp4-modelopt")
    twin, written = dequantize_head(HeadFolder(head).load_all()), Checkpoint(out)
    assert set(twin) == set(written.head_names)
    for name, tensor in twin.items():
        assert torch.equal(written.load(name).view(torch.int16), tensor.view(torch.int16)), name


def test_conversion_never_holds_more_than_some_rows(tmp_path):
    """An expert of a 397B-class model, 16 times over: memory stays below two of its matrices."""
    rows, columns = 4096, 4096
    tensors = {
        "mtp.x.weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "mtp.x.weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
        "mtp.x.weight_scale_2": torch.tensor(1e-3),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    infos = TensorStore([tmp_path / "a.safetensors"]).infos()
    (planned,) = convert.convert_head(infos, "nvfp4-modelopt", "bf16-per-expert")
    tracemalloc.start()
    written = sum(len(chunk) for chunk in planned.chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written == planned.nbytes == 2 * rows * columns
    assert peak < 40e6


@pytest.mark.parametrize("old", [form for form in FORMS if form.startswith("nvfp4")])
@pytest.mark.parametrize("new", FORMS[1:])
def test_every_conversion_gives_a_complete_head_of_the_new_form_or_a_refusal(tmp_path, old, new):
    base = write_base(tmp_path / "base")
    head = HeadFolder(write_tiny_head(tmp_path / "head", base, form=old))
    needs_scales = new in ("nvfp4-modelopt", "nvfp4-compressed-tensors")
    if old.endswith("w4a16") and needs_scales:
        with pytest.raises(UserError, match="input scales"):
            convert.convert_head(head.infos(), old, new)
        return
    tensors = convert.convert_head(head.infos(), old, new)
    wanted = head_tensors(TEXT_CONFIG, 4, new)
    assert {t.name: (t.dtype, tuple(t.shape)) for t in tensors} == wanted
    write_shard(tmp_path / "out.safetensors", tensors)
    written = load_file(tmp_path / "out.safetensors")
    assert head_form(written) == new
    left = dequantize_head(head.load_all())
    for name, tensor in dequantize_head(written).items():
        assert torch.allclose(tensor.float(), left[name].float(), rtol=2**-7, atol=0), name


@pytest.mark.parametrize("name", [n for n, row in QUANTIZED.items() if two_files(row)])
@pytest.mark.parametrize("form", ["bf16-fused", "nvfp4-modelopt"])
def test_bug_B13_both_config_files_say_the_same(tmp_path, name, form):
    _, _, out = grafted(tmp_path, name, form)
    block, file = blocks(out)
    inner = file["quantization"]
    assert block["ignore"] == inner["exclude_modules"]
    assert "quantized_layers" not in block or block["quantized_layers"] == inner["quantized_layers"]
    # Negative control: verify sees them apart.
    inner["exclude_modules"].append("model.extra")
    (out / "hf_quant_config.json").write_text(json.dumps(file))
    assert any("exclude different" in failure for failure in verify_graft(out).failures)


def test_a_mixture_names_the_heads_experts_and_forgets_those_of_the_old_head(tmp_path):
    name = "modelopt MIXED_PRECISION"
    base = write_base(tmp_path / "base", quantized=name, declared=1)
    for file, inner in (("config.json", "quantization_config"),
                        ("hf_quant_config.json", "quantization")):  # fmt: skip
        value = json.loads((base / file).read_text())
        value[inner]["quantized_layers"]["mtp.fc"] = {"quant_algo": "FP8"}
        (base / file).write_text(json.dumps(value))
    head = write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt")
    out = write_graft(plan_graft(base, head), tmp_path / "out").out
    layers = blocks(out)[1]["quantization"]["quantized_layers"]
    entry = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    mtp = {n: v for n, v in layers.items() if n.startswith("mtp")}
    assert mtp == {f"mtp.layers.{n}.mlp.experts": entry for n in range(4)}
    trunk = blocks(base)[1]["quantization"]["quantized_layers"].items()
    assert {n: v for n, v in trunk if n != "mtp.fc"} == {
        n: v for n, v in layers.items() if n not in mtp}  # fmt: skip
    assert verify_graft(out, base).ok


@pytest.mark.parametrize("form", ["bf16-fused", "bf16-per-expert", "nvfp4-modelopt"])
def test_bug_B3_fc_is_always_in_the_list_of_compressed_tensors(tmp_path, form):
    base, _, out = grafted(tmp_path, "compressed-tensors W4A4", form)
    ignore = blocks(out)[0]["ignore"]
    # A base's pattern that covers the whole head stays where the whole head is BF16.
    assert [e for e in ignore if e in ("mtp.fc", "re:^mtp.*")] == [
        "mtp.fc" if form == "nvfp4-modelopt" else "re:^mtp.*"
    ]
    assert set(blocks(base)[0]["ignore"]) - set(ignore) <= {"re:^mtp.*"}  # nothing else is lost
    with_list(out, lambda entries: [e for e in entries if e not in ("mtp.fc", "re:^mtp.*")])
    assert any("mtp.fc" in failure for failure in verify_graft(out).failures)


def with_list(folder, change):
    value = json.loads((folder / "config.json").read_text())
    block = value["quantization_config"]
    key = "ignore" if "ignore" in block else "modules_to_not_convert"
    block[key] = change(block[key])
    (folder / "config.json").write_text(json.dumps(value))


@pytest.mark.parametrize("name", ["compressed-tensors W4A4", "FP8 block"])
def test_bug_B4_half_a_fused_module_fails_verify(tmp_path, name):
    _, _, out = grafted(tmp_path, name, "bf16-per-expert")
    names = [f"mtp.layers.2.self_attn.{p}_proj" for p in "qkv"]
    with_list(out, lambda entries: [
        e for e in entries if e != "re:^mtp.*" and "layers.2.self_attn" not in e] + names[:1]
    )  # fmt: skip
    assert any("some but not all" in f and "layers.2" in f for f in verify_graft(out).failures)


# Of a mixture, what is not listed is BF16.
@pytest.mark.parametrize(
    "name", [n for n, row in QUANTIZED.items() if row.get("block", True) and "MIXED" not in n]
)
def test_bug_B2_experts_of_a_bf16_head_left_out_of_the_list_fail_verify(tmp_path, name):
    _, _, out = grafted(tmp_path, name, "bf16-fused")
    with_list(out, lambda entries: [e for e in entries if not e.startswith(("mtp", "re:^mtp"))])
    failures = verify_graft(out).failures
    assert sum(".mlp.experts is stored unquantized" in failure for failure in failures) == 4


def test_fp8_lists_every_module_of_the_head_by_name(tmp_path):
    _, _, out = grafted(tmp_path, "FP8 block", "bf16-fused")
    listed = [n for n in blocks(out)[0]["modules_to_not_convert"] if n.startswith("mtp")]
    assert len(listed) == len(set(listed)) == 1 + 4 * 10
    assert "mtp.layers.3.mlp.experts" in listed and not any("*" in name for name in listed)


@pytest.mark.parametrize("name", QUANTIZED)
def test_twice_is_once_and_the_extracted_head_is_the_written_one(tmp_path, name):
    base, head, once = grafted(tmp_path, name, "nvfp4-modelopt", head_layers=1)
    again = plan_graft(once, head, allow_mismatch=True)
    assert (again.added, again.dropped, again.config_changes) == ((), (), ())
    extract_head(once, tmp_path / "extracted")
    out = write_graft(plan_graft(base, tmp_path / "extracted"), tmp_path / "again").out
    left, right = Checkpoint(once), Checkpoint(out)
    assert left.head_names == right.head_names
    assert all(left.digest(n) == right.digest(n) for n in left.head_names)


@pytest.mark.parametrize("name", ["compressed-tensors W4A16", "FP8 block"])
def test_a_single_file_without_an_index_and_text_only(tmp_path, name):
    base = write_base(tmp_path / "base", quantized=name, num_shards=1)
    head = write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt")
    plan = plan_graft(base, head, text_only=True)
    report = verify_graft(write_graft(plan, tmp_path / "out").out)
    assert report.ok and report.form == WRITTEN[name], report.as_text()


def test_w4a16_head_on_an_unquantized_base_is_stated_as_such(tmp_path):
    base = write_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt-w4a16")
    out = write_graft(plan_graft(base, head), tmp_path / "out").out
    block, file = blocks(out)
    assert block["quant_algo"] == file["quantization"]["quant_algo"] == "W4A16_NVFP4"
    assert block["config_groups"]["group_0"]["input_activations"] is None
    assert verify_graft(out, base).ok


def test_a_dense_head_goes_onto_quantized_bases_as_it_is(tmp_path):
    for number, name in enumerate(["compressed-tensors W4A4", "FP8 block", "modelopt NVFP4"]):
        base = write_base(tmp_path / f"base{number}", quantized=name, dense=True)
        head = write_tiny_head(tmp_path / f"head{number}", base)
        out = write_graft(plan_graft(base, head), tmp_path / f"out{number}").out
        assert verify_graft(out, base).ok, verify_graft(out, base).as_text()
