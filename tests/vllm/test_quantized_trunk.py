"""A trunk that `mtp quantize --trunk` wrote, with a head grafted on, in vLLM's own loaders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_quantized_loading import LAYOUT, assert_bytes_arrived, load, one_process
from tiny import write_base, write_tiny_head

from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.writer import write_graft
from quantize.trunk_writer import open_plain_base, write_trunk

__all__ = ["load", "one_process"]  # fixtures
PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def grafted(folder: Path, form: str, experts: str, scheme: str) -> Path:
    base = write_base(folder / "base", declared=1, experts=experts, **LAYOUT)
    checkpoint = open_plain_base(base)
    prefixes = {n.partition(".experts.")[0] for n in checkpoint.names if ".experts." in n}
    amax = {f"{p}.experts.{part}": 2.0 for p in prefixes for part in ("gate_up_proj", "down_proj")}
    (folder / "nvfp4").mkdir()
    if scheme == "w4a4":
        write_trunk(checkpoint, folder / "nvfp4", "NVFP4", amax, PRODUCER)
    else:
        write_trunk(checkpoint, folder / "nvfp4", "W4A16_NVFP4", {}, PRODUCER)
    head = write_tiny_head(folder / "head", folder / "nvfp4", form=form)
    return write_graft(plan_graft(folder / "nvfp4", head), folder / "out").out


@pytest.mark.parametrize("experts", ["fused", "per_expert"])
@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
@pytest.mark.parametrize("form", ["bf16-per-expert", "nvfp4-modelopt"])
def test_trunk_and_head_load_and_their_bytes_arrive(
    tmp_path: Path, load: Any, form: str, scheme: str, experts: str
) -> None:
    folder = grafted(tmp_path, form, experts, scheme)
    head = load(folder, target_too="loaded")
    written = json.loads((folder / "graft.manifest.json").read_text())["head"]["form"]
    assert_bytes_arrived(folder, head, written)
    stored, target = Checkpoint(folder), load.target
    found = [m for m in target.modules() if type(m).__name__ == "RoutedExperts"]
    assert len(found) == 2
    for layer, module in enumerate(found):
        assert "NvFp4" in type(module.quant_method).__name__
        for expert in range(4):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            for part in ("weight", "weight_scale"):
                gate_up = [stored.load(f"{prefix}.{p}_proj.{part}") for p in ("gate", "up")]
                loaded = getattr(module, f"w13_{part}")[expert]
                assert torch.equal(loaded.view(torch.uint8), torch.cat(gate_up).view(torch.uint8))
                down = stored.load(f"{prefix}.down_proj.{part}")
                loaded = getattr(module, f"w2_{part}")[expert]
                assert torch.equal(loaded.view(torch.uint8), down.view(torch.uint8))
            scale = stored.load(f"{prefix}.gate_proj.weight_scale_2")
            assert torch.equal(module.w13_weight_scale_2[expert], scale.expand(2))
    attention = next(m for m in target.modules() if hasattr(m, "qkv_proj"))
    wanted = [stored.load(f"model.layers.0.self_attn.{x}_proj.weight") for x in "qkv"]
    assert torch.equal(attention.qkv_proj.weight, torch.cat(wanted))


def test_a_trunk_whose_experts_are_excluded_does_not_load(tmp_path: Path, load: Any) -> None:
    folder = grafted(tmp_path, "nvfp4-modelopt", "fused", "w4a16")
    for file, inner, key in (
        ("config.json", "quantization_config", "ignore"),
        ("hf_quant_config.json", "quantization", "exclude_modules"),
    ):
        value = json.loads((folder / file).read_text())
        value[inner][key].append("model.layers.0.mlp.experts*")
        (folder / file).write_text(json.dumps(value))
    with pytest.raises(Exception, match=r"w13|has no parameter|size"):
        load(folder, target_too="loaded")
