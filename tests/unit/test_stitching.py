"""The stitching benchmark's judge: it passes what graft writes, and sees every kind of damage."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import random_head, write_base, write_tiny_head

from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.writer import write_graft

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "graft"))
from judge import INDEX, digests, judge

OLD = {"declared": 1, "head_layers": 1}
TRUNK_SHARD, HEAD_SHARD = "model-00001-of-00003.safetensors", "model_mtp.safetensors"
CONFIG = "quantization config fits"


def graft(tmp_path, num_layers=4, **layout):
    base = write_base(tmp_path / "base", **layout)
    tensors = random_head(Checkpoint(base).text_config, num_layers, "bf16-fused", seed=9)
    head = write_tiny_head(tmp_path / "head", base, num_layers=num_layers, tensors=tensors)
    before = digests(base)
    out = write_graft(plan_graft(base, head), tmp_path / "out", link="copy").out
    assert digests(base) == before
    return out, base, tensors


@pytest.mark.parametrize("num_layers", [1, 4])
@pytest.mark.parametrize(
    "layout",
    [OLD, OLD | {"head_place": "mixed", "num_shards": 1},
     {"quantized": "modelopt NVFP4", **OLD, "head_form": "nvfp4-modelopt"}, {}],
    ids=["fused, sharded", "fused, single file", "NVFP4 head", "new layers"],
)  # fmt: skip
def test_bug_C2_the_bases_on_which_stitching_fails(tmp_path, layout, num_layers):
    found = judge(*graft(tmp_path, num_layers, **layout))
    assert len(found) == 8 and not any(found.values()), found


def edit(name, change, of_json=False):
    def apply(out):
        path = out / name
        if of_json:
            value = json.loads(path.read_text())
            change(value)
            path.write_text(json.dumps(value))
        else:
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path, metadata={"format": "pt"})

    return apply


def twice(out):
    save_file({"mtp.norm.weight": torch.ones(32).bfloat16()}, out / "more.safetensors")
    edit(INDEX, lambda index: index["weight_map"].update(x="more.safetensors"), True)(out)


GATE = "mtp.layers.0.mlp.experts.1.gate_proj.weight"
EMBED = "model.language_model.embed_tokens.weight"
DAMAGE = {
    "files open": lambda out: (out / HEAD_SHARD).write_bytes(b"version https://git-lfs"),
    "index is true": edit(INDEX, lambda i: i["weight_map"].pop("mtp.fc.weight"), True),
    "total_size is right": edit(INDEX, lambda i: i["metadata"].update(total_size=7), True),
    "each weight once": edit(HEAD_SHARD, lambda t: t.update({GATE: torch.ones(16, 32).bfloat16()})),
    "each weight once, in two shards": twice,
    "head is whole, for the stated layers": edit(HEAD_SHARD, lambda t: t.pop("mtp.norm.weight")),
    "head is whole, as stated": edit(
        "config.json", lambda c: c["text_config"].update(mtp_num_hidden_layers=3), True),
    "head is whole, no leftovers": edit(
        HEAD_SHARD, lambda t: t.update({"mtp.fc.weight_scale": torch.ones(1)})),
    "head is the one given": edit(HEAD_SHARD, lambda t: t["mtp.fc.weight"].mul_(2)),
    "trunk bytes unchanged": edit(TRUNK_SHARD, lambda t: t[EMBED].neg_()),
    CONFIG: edit("config.json", lambda c: c["quantization_config"].update(ignore=[]), True),
}  # fmt: skip


@pytest.mark.parametrize("check", DAMAGE)
def test_each_check_fails_on_its_damage(tmp_path, check):
    layout = {"quantized": "modelopt NVFP4, config.json alone"} if check == CONFIG else {}
    out, base, head = graft(tmp_path, **layout)
    DAMAGE[check](out)
    found = judge(out, base, head)
    (name,) = [name for name in found if name.startswith(check.split(",")[0])]
    assert found[name], found
