"""A head out of a checkpoint: the same bytes, the right pairing, usable for what comes next."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BASES, write_base, write_tiny_head
from tiny_quantized import QUANTIZED

from graft.errors import UserError
from graft.extract import extract_head
from graft.manifest import HeadFolder
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.writer import write_graft
from mtp.head import load_head, save_head
from mtp.warm_start import head_from_base


def bytes_of(store):
    return {n: b"".join(store.chunks(n)) for n in store.names if n.startswith("mtp.")}


@pytest.mark.parametrize("form", ["bf16-fused", "bf16-per-expert", "nvfp4-modelopt"])
def test_graft_extract_graft_gives_the_same_head(tmp_path, form):
    base = write_base(tmp_path / "base")
    provenance = {"licences": ["MIT"], "tokens": 5}
    head = write_tiny_head(tmp_path / "head", base, form=form, provenance=provenance)
    once = write_graft(plan_graft(base, head), tmp_path / "once").out
    result = extract_head(once, tmp_path / "again", tool="mtp-graft 0")
    assert (result.num_layers, result.form, result.grafted) == (4, form, True)
    assert bytes_of(HeadFolder(tmp_path / "again")) == bytes_of(HeadFolder(head))
    old, new = HeadFolder(head).metadata, HeadFolder(tmp_path / "again").metadata
    assert new["base_fingerprint"] == old["base_fingerprint"]
    assert new["provenance"] == provenance | {
        "extracted_from": {
            "folder": "once", "model_type": "qwen3_5_moe", "grafted": True, "tool": "mtp-graft 0"}
    }  # fmt: skip
    twice = write_graft(plan_graft(base, tmp_path / "again"), tmp_path / "twice").out
    assert bytes_of(Checkpoint(twice)) == bytes_of(Checkpoint(once))
    assert (twice / "config.json").read_bytes() == (once / "config.json").read_bytes()


@pytest.mark.parametrize("name", [n for n in QUANTIZED if "FP8" not in n])
def test_heads_converted_for_a_quantized_base_come_out_as_they_lie_there(tmp_path, name):
    base = write_base(tmp_path / "base", quantized=name)
    head = write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt")
    once = write_graft(plan_graft(base, head), tmp_path / "once").out
    result = extract_head(once, tmp_path / "again")
    assert result.form.startswith("nvfp4") and HeadFolder(tmp_path / "again").form == result.form
    twice = write_graft(plan_graft(base, tmp_path / "again"), tmp_path / "twice").out
    assert bytes_of(Checkpoint(twice)) == bytes_of(Checkpoint(once))
    assert (twice / "config.json").read_bytes() == (once / "config.json").read_bytes()


def test_an_fp8_head_is_refused_by_name(tmp_path):
    base = write_base(tmp_path / "base", declared=1, head_layers=1, head_place="standalone")
    tensors = load_file(base / "mtp.safetensors")
    scale = {"mtp.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors | scale, base / "mtp.safetensors")
    with pytest.raises(UserError, match="FP8 blocks"):
        extract_head(base, tmp_path / "head")


@pytest.mark.parametrize("name", [n for n in BASES if BASES[n].get("head_layers")])
def test_bug_A4_native_heads_are_extracted_from_wherever_they_lie(tmp_path, name):
    base = write_base(tmp_path / "base", **BASES[name])
    result = extract_head(base, tmp_path / "head")
    assert result.num_layers == BASES[name]["head_layers"] and not result.grafted
    assert bytes_of(HeadFolder(tmp_path / "head")) == bytes_of(Checkpoint(base))
    out = write_graft(plan_graft(base, tmp_path / "head"), tmp_path / "out").out
    assert bytes_of(Checkpoint(out)) == bytes_of(Checkpoint(base))


def test_a_head_that_is_absent_or_not_whole_is_refused_and_nothing_is_written(tmp_path):
    absent = write_base(tmp_path / "absent", declared=4)
    with pytest.raises(UserError, match="4 MTP layers declared, none there"):
        extract_head(absent, tmp_path / "out")
    base = write_base(tmp_path / "base", declared=1, head_layers=1, head_place="standalone")
    tensors = load_file(base / "mtp.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, base / "mtp.safetensors")
    with pytest.raises(UserError, match=r"mtp\.norm\.weight is missing"):
        extract_head(base, tmp_path / "out")
    tensors["mtp.norm.weight"] = torch.full((32,), float("nan")).bfloat16()
    save_file(tensors, base / "mtp.safetensors")
    with pytest.raises(UserError, match="not finite"):
        extract_head(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["base_fingerprint", "provenance", "quantization", "acceptance"])
def test_a_manifest_that_remembers_something_else_is_refused(tmp_path, key):
    base = write_base(tmp_path / "base")
    out = write_graft(plan_graft(base, write_tiny_head(tmp_path / "h", base)), tmp_path / "o").out
    manifest = json.loads((out / "graft.manifest.json").read_text())
    manifest["head"][key] = "re:("
    (out / "graft.manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=key):
        extract_head(out, tmp_path / "head")


def test_a_head_changed_since_the_graft_is_not_sold_as_the_recorded_one(tmp_path):
    base = write_base(tmp_path / "base")
    out = write_graft(plan_graft(base, write_tiny_head(tmp_path / "h", base)), tmp_path / "o").out
    head = load_file(out / "model_mtp.safetensors")
    head["mtp.fc.weight"][0, 0] += 1
    save_file(head, out / "model_mtp.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="would not be true"):
        extract_head(out, tmp_path / "head")
    (out / "graft.manifest.json").unlink()
    assert not extract_head(out, tmp_path / "head").grafted


def test_the_checkpoint_itself_is_never_the_output(tmp_path):
    base = write_base(tmp_path / "base", declared=1, head_layers=1)
    with pytest.raises(UserError, match="apart from the input"):
        extract_head(base, base, overwrite=True)


@pytest.mark.parametrize(("num_layers", "sources"), [(4, [0, 1, 1, 1]), (1, [0]), (2, [0, 1])])
def test_an_extracted_head_is_a_warm_start(random_base, tmp_path, num_layers, sources):
    trained = head_from_base(Checkpoint(random_base), 2, "last")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path / "trained"
    folder.mkdir()
    from graft.manifest import base_fingerprint

    fingerprint = base_fingerprint(Checkpoint(random_base))
    save_head(trained, folder, base_fingerprint=fingerprint, provenance={})
    grafted = write_graft(plan_graft(random_base, folder), tmp_path / "grafted").out
    extract_head(grafted, tmp_path / "head")
    start = head_from_base(Checkpoint(random_base), num_layers, str(tmp_path / "head"))
    wanted = load_head(folder).state_dict()
    assert torch.equal(start.fc.weight, wanted["fc.weight"])
    for layer, source in enumerate(sources):
        for name, tensor in start.layers[layer].state_dict().items():
            assert torch.equal(tensor, wanted[f"layers.{source}.{name}"])


def test_a_warm_start_of_other_sizes_or_from_nowhere_is_refused(random_base, tmp_path):
    other = write_base(tmp_path / "other", declared=1, head_layers=1)  # head_dim 16, not 32
    extract_head(other, tmp_path / "head")
    with pytest.raises(UserError, match="other shapes"):
        head_from_base(Checkpoint(random_base), 1, str(tmp_path / "head"))
    with pytest.raises(UserError, match="warm_start auto"):
        head_from_base(Checkpoint(random_base), 1, str(tmp_path / "nowhere"))


def test_the_command(tmp_path):
    from typer.testing import CliRunner

    from mtp.cli import app

    base = write_base(tmp_path / "base", declared=1, head_layers=1)
    arguments = ["head", "extract", str(base), "--out", str(tmp_path / "head"), "--json"]
    result = CliRunner().invoke(app, arguments)
    found = json.loads(result.output)
    assert result.exit_code == 0 and found["schema_version"] == 1 and found["num_tensors"] == 19
