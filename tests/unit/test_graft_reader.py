"""Opening a checkpoint: every lie a file can tell is one clear error that names the file."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import BASES, write_base

from graft.errors import UserError
from graft.index import INDEX_NAME, index_of, read_header
from graft.reader import Checkpoint


def shard_bytes(header, data=b"\0" * 8):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(begin, end, shape=(2,), dtype="F16"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


SOUND = shard_bytes({"a": entry(0, 4), "b": entry(4, 8)})
BROKEN = {
    "0 bytes": b"",
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
    "web page": b"<!DOCTYPE html><html><body>404</body></html>",
    "header would take": struct.pack("<Q", 2**40) + b"{}",
    "cut off": struct.pack("<Q", 5000) + b"{}",
    "truncated": SOUND[:-3],
    "trailing bytes": SOUND + b"\0",
    "overlaps": shard_bytes({"a": entry(0, 4), "b": entry(2, 6)}, b"\0" * 6),
    "gap": shard_bytes({"a": entry(0, 4), "b": entry(6, 10)}, b"\0" * 10),
    "promises": shard_bytes({"a": entry(0, 4), "b": entry(4, 8)}, b"\0" * 5),
    "appears twice": shard_bytes(
        b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F16","shape":[2],"data_offsets":[4,8]}}'
    ),
    "does not fit": shard_bytes({"a": entry(0, 8, (3,))}),
    "unknown dtype": shard_bytes({"a": entry(0, 8, (8,), "Q4_K")}),
    "malformed shape": shard_bytes({"a": entry(0, 8, (-4,))}),
    "malformed entry": shard_bytes({"a": [0, 8]}),
    "not valid JSON": shard_bytes(b"{nonsense"),
    "not a JSON object": shard_bytes(b"[]"),
}


@pytest.mark.parametrize("found", BROKEN)
def test_bug_E4_broken_shards_are_named(tmp_path, found):
    base = write_base(tmp_path / "base")
    victim = next(base.glob("model-00002*"))
    victim.write_bytes(BROKEN[found])
    with pytest.raises(UserError, match=found) as caught:
        Checkpoint(base)
    assert victim.name in str(caught.value) and "\n" not in str(caught.value)


def test_a_sound_header_gives_names_dtypes_shapes_and_bytes(tmp_path):
    tensors = {
        "x": torch.randn(3, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "codes": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        "scale": torch.rand(2, 2).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
    }
    write_base(tmp_path / "base", nested=False, prefix="model.", num_shards=1)
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    checkpoint = Checkpoint(tmp_path / "base")
    assert set(checkpoint.names) == set(tensors)
    assert checkpoint.info("x").shape == (3, 5) and checkpoint.info("x").dtype == "BF16"
    for name, tensor in tensors.items():
        mine = checkpoint.load(name)
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape
        assert torch.equal(mine.float(), tensor.float())
    checkpoint.load("x").zero_()  # memory of its own: the file is untouched
    assert torch.equal(checkpoint.load("x"), tensors["x"])
    with pytest.raises(UserError, match="nothing_here"):
        checkpoint.load("nothing_here")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300) | st.binary(max_size=60).map(lambda b: SOUND[: len(b)] + b))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "x.safetensors"
    path.write_bytes(data)
    try:
        header = read_header(path)
    except UserError:
        return
    assert set(header) == set(load_file(path))


def edit_json(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/x.safetensors", "a/../../b", ""])
def test_shard_names_may_not_leave_the_folder(tmp_path, shard):
    base = write_base(tmp_path / "base")
    edit_json(base / INDEX_NAME, lambda v: v["weight_map"].update({"lm_head.weight": shard}))
    with pytest.raises(UserError, match="outside its folder"):
        Checkpoint(base)


def test_bug_E2_missing_shard_is_refused_and_extra_one_reported(tmp_path):
    base = write_base(tmp_path / "base")
    save_file({"other": torch.ones(1)}, base / "extra.safetensors")
    assert Checkpoint(base).unindexed == ("extra.safetensors",)
    next(base.glob("model-00003*")).unlink()
    with pytest.raises(UserError, match="model-00003"):
        Checkpoint(base)


def test_bug_A8_index_that_names_a_tensor_its_shard_lacks(tmp_path):
    base = write_base(tmp_path / "base")
    first = next(base.glob("model-00001*")).name
    edit_json(base / INDEX_NAME, lambda v: v["weight_map"].update({"phantom": first}))
    with pytest.raises(UserError, match="phantom"):
        Checkpoint(base)


def test_one_tensor_in_two_shards_is_refused(tmp_path):
    base = write_base(tmp_path / "base", index=False)
    save_file({"lm_head.weight": torch.ones(1)}, base / "stale.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight in both"):
        Checkpoint(base)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"a": 1, "a": 2}', "\ufeff{}"])
def test_config_missing_or_broken(tmp_path, text):
    base = write_base(tmp_path / "base")
    (base / "config.json").unlink()
    if text is not None:
        (base / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        Checkpoint(base)


def test_pickles_are_refused_by_name(tmp_path):
    base = write_base(tmp_path / "base", num_shards=1)
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        Checkpoint(base)
    (base / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="none"):
        Checkpoint(base)
    with pytest.raises(UserError, match="nothing"):
        Checkpoint(tmp_path / "absent")


def test_unsupported_models_and_other_engines_layouts_are_refused(tmp_path):
    base = write_base(tmp_path / "base")
    Checkpoint(base).require_supported()
    edit_json(base / "config.json", lambda v: v.update(model_type="llama"))
    with pytest.raises(UserError, match="'llama'"):
        Checkpoint(base).require_supported()
    mlx = write_base(tmp_path / "mlx", prefix="language_model.model.")
    with pytest.raises(UserError, match="MLX"):
        Checkpoint(mlx).require_supported()


@pytest.mark.parametrize("name", [n for n in BASES if "one-layer" in n])
def test_bug_A4_heads_are_found_wherever_they_lie(tmp_path, name):
    checkpoint = Checkpoint(write_base(tmp_path / "base", **BASES[name]))
    per_expert = BASES[name].get("head_form") == "bf16-per-expert"
    # facts: 19 tensors for 1 layer fused; here 4 experts of 3 matrices stand for 2 fused ones
    assert len(checkpoint.head_names) == (19 - 2 + 3 * 4 if per_expert else 19)
    experts = "experts.3.up_proj.weight" if per_expert else "experts.gate_up_proj"
    assert f"mtp.layers.0.mlp.{experts}" in checkpoint


def test_total_size_counts_tensor_bytes(tmp_path):
    base = write_base(tmp_path / "base")
    index = index_of(Checkpoint(base).infos(), {})
    assert index == json.loads((base / INDEX_NAME).read_text()) | {
        "weight_map": dict(sorted(index["weight_map"].items()))
    }
