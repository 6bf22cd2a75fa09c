"""The head in the form that the base's quantization can express, and what the configs say then."""

from __future__ import annotations

import json

import pytest
from tiny import QUANTIZED, write_base, write_tiny_head

from graft.plan import plan_graft
from graft.verify import verify_graft
from graft.writer import write_graft

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


def blocks(folder):
    config = json.loads((folder / "config.json").read_text())
    file = folder / "hf_quant_config.json"
    return config.get("quantization_config"), json.loads(
        file.read_text()
    ) if file.exists() else None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("form", ["bf16-fused", "bf16-per-expert", "nvfp4-modelopt"])
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
