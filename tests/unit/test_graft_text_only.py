"""--text-only: what transformers' own text-only export is, without loading a model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BASES, write_base, write_tiny_head
from vision_base import save_vision_base

from graft.errors import UserError
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.text_only import plan_text_only, text_only_config, without_vision
from graft.verify import verify_graft
from graft.writer import write_graft


def graft(base, head, out, **keywords):
    return write_graft(plan_graft(base, head, text_only=True, **keywords), out)


@pytest.mark.parametrize("dense", [False, True])
def test_the_result_is_transformers_own_text_only_export(tmp_path, dense):
    from transformers import AutoModelForCausalLM

    base = save_vision_base(tmp_path / "base", dense)
    result = graft(base, write_tiny_head(tmp_path / "head", base), tmp_path / "out")
    wanted = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    wanted.save_pretrained(tmp_path / "reference")
    found = AutoModelForCausalLM.from_pretrained(result.out, dtype="auto")
    assert type(found) is type(wanted)
    tokens = torch.randint(0, 58, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, wanted(tokens).logits)

    theirs, ours = (json.loads((f / "config.json").read_text())
                    for f in (tmp_path / "reference", result.out))  # fmt: skip
    assert ours.pop("mtp_num_hidden_layers") == 4 and theirs.pop("mtp_num_hidden_layers") == 1
    assert ours == theirs
    reference = Checkpoint(tmp_path / "reference")
    trunk = {n for n in Checkpoint(result.out).names if not n.startswith("mtp.")}
    assert trunk == set(reference.names)


def test_bytes_saved_files_left_out_and_shards_are_told(tmp_path):
    base = save_vision_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base)
    result = graft(base, head, tmp_path / "out")
    full = write_graft(plan_graft(base, head), tmp_path / "full")
    vision = [n for n in Checkpoint(base).names if n.startswith("model.visual.")]
    stored = sum(Checkpoint(base).info(n).nbytes for n in vision)
    manifest = result.manifest["text_only"]
    assert manifest["dropped"] == vision and full.manifest["text_only"] is None
    assert manifest["saved_bytes"] == stored + 4
    assert manifest["left_out"] == ["preprocessor_config.json", "video_preprocessor_config.json"]
    assert f"{stored + 4} bytes saved" in result.as_text()
    assert result.manifest["changes"]["reemitted_shards"], "no shard mixes vision and text here"
    assert any("made flat" in line for line in result.manifest["changes"]["config"])
    assert (result.out / "chat_template.jinja").exists()
    assert not (result.out / "preprocessor_config.json").exists()
    kept = {**result.manifest["files"]}
    for name in result.plan.kept_shards:
        assert kept[name]["storage"] == "hard-link"
    on_disk = {n for f in result.out.glob("*.safetensors") for n in load_file(f)}
    assert not [n for n in on_disk if "visual" in n]
    assert [c.status for c in verify_graft(result.out, base).checks] == ["pass"] * 8


def test_verify_wants_the_vision_tower_unless_the_config_is_text_only(tmp_path):
    base = save_vision_base(tmp_path / "base")
    out = graft(base, write_tiny_head(tmp_path / "head", base), tmp_path / "out").out
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 4
    (out / "config.json").write_text(json.dumps(config))
    failures = verify_graft(out, base).failures
    assert any("model.visual.blocks.0.attn.proj.weight is missing" in f for f in failures)


@pytest.mark.parametrize("name", [n for n, row in BASES.items() if row.get("nested") is False])
def test_a_text_only_base_loses_nothing(tmp_path, name):
    base = write_base(tmp_path / "base", **BASES[name])
    head = write_tiny_head(tmp_path / "head", base)
    result = graft(base, head, tmp_path / "out")
    plain = write_graft(plan_graft(base, head), tmp_path / "plain")
    assert result.manifest["text_only"] == {"dropped": [], "left_out": [], "saved_bytes": 0}
    assert "no vision tower" in result.as_text()
    assert result.manifest["files"] == plain.manifest["files"]


def test_twice_is_once(tmp_path):
    base = save_vision_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base)
    once = graft(base, head, tmp_path / "once")
    twice = graft(once.out, head, tmp_path / "twice")  # and its fingerprint is the base's
    assert twice.plan.mismatches == ()
    names = [n for n in once.manifest["files"] if n.endswith((".json", ".safetensors"))]
    for name in names:
        assert once.manifest["files"][name]["sha256"] == twice.manifest["files"][name]["sha256"]


def test_contradictions_are_refused(tmp_path):
    base = write_base(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3_5MoeForCausalLM"]})
    )
    with pytest.raises(UserError, match="no vision tensors"):
        plan_text_only(Checkpoint(base))
    with pytest.raises(UserError, match="text_config with a model_type"):
        text_only_config({"architectures": ["A"], "text_config": {"hidden_size": 1}}, base)


@pytest.mark.parametrize(
    "prefix", ["model.vision_tower.", "vision_model.", "model.language_model.v."]
)
def test_a_vision_tower_under_another_name_is_refused_and_not_kept(tmp_path, prefix):
    base = write_base(tmp_path / "base", num_shards=1)
    file = base / "model.safetensors"
    renamed = {n.replace("model.visual.", prefix): t for n, t in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"3 of neither .* such as {prefix}"):
        plan_text_only(Checkpoint(base))


def test_outer_facts_are_carried_and_vision_names_go():
    text = {"model_type": "qwen3_5_moe_text", "hidden_size": 32}
    block = {
        "quant_method": "modelopt", "ignore": ["lm_head", "model.visual*", "visual.merger", "mtp*"],
        "quantized_layers": {"model.visual.blocks.0.attn.qkv": {}, "model.layers.0": {}},
        "quantization": {"exclude_modules": ["model.visual*", "*visual_gate"]},
    }  # fmt: skip
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text,
        "tie_word_embeddings": True, "dtype": "bfloat16", "image_token_id": 5,
        "quantization_config": block, "vision_config": {},
    }  # fmt: skip
    flat = without_vision(text_only_config(config, None))
    assert flat["tie_word_embeddings"] is True and flat["dtype"] == "bfloat16"
    assert "image_token_id" not in flat and "vision_config" not in flat
    assert flat["quantization_config"] == {
        "quant_method": "modelopt", "ignore": ["lm_head", "mtp*"],
        "quantized_layers": {"model.layers.0": {}},
        "quantization": {"exclude_modules": ["*visual_gate"]},
    }  # fmt: skip
    assert config["quantization_config"]["ignore"][1] == "model.visual*", "the base's was edited"
