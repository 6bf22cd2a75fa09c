"""A base that modelopt itself quantized and exported: read here, and equal to ours."""

import json

import pytest
import torch

from graft.reader import Checkpoint
from graft.schemes import precision_problems, read_statement
from mtp.teacher import Teacher
from quantize.calibration import quantizer_config, quiet
from quantize.trunk_writer import open_plain_base, write_trunk

ROWS = torch.randint(0, 64, (3, 1, 32), generator=torch.Generator().manual_seed(2)).unbind(0)


@pytest.fixture(scope="module", params=["w4a4", "w4a16"])
def exported(request, random_base, tmp_path_factory):
    """The scheme, the folder that modelopt wrote, and the largest inputs that it saw."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("modelopt") / "base"
    model = AutoModelForCausalLM.from_pretrained(random_base, dtype=torch.bfloat16)
    model.set_experts_implementation("eager")
    with quiet(), torch.no_grad():
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        def read_rows(model):
            for row in ROWS:
                model(input_ids=row)

        mtq.quantize(model, quantizer_config(request.param), read_rows)
        amax = {
            f"{name}.{projection}": getattr(module, f"{projection}_input_quantizer").amax.item()
            for name, module in model.named_modules()
            if hasattr(module, "gate_up_proj_weight_quantizers") and request.param == "w4a4"
            for projection in ("gate_up_proj", "down_proj")
        }
        export_hf_checkpoint(model, export_dir=folder)
    return request.param, folder, amax


def test_a_base_that_modelopt_wrote_is_read(exported, random_base):
    scheme, folder, _ = exported
    base = Checkpoint(folder)
    wanted = {"w4a4": "modelopt NVFP4", "w4a16": "modelopt W4A16_NVFP4"}[scheme]
    assert read_statement(base).name == wanted
    assert precision_problems(base) == []
    (folder / "tokenizer.json").write_text("{}")
    teacher, plain = Teacher.load(folder, device="cpu"), Teacher.load(random_base, device="cpu")
    found, original = teacher.hidden(ROWS[0]), plain.hidden(ROWS[0])
    assert 0 < (found - original).norm() / original.norm() < 0.5


def test_the_same_base_by_our_writer_holds_the_same_bytes(exported, random_base, tmp_path):
    scheme, folder, amax = exported
    algo = {"w4a4": "NVFP4", "w4a16": "W4A16_NVFP4"}[scheme]
    (tmp_path / "ours").mkdir()
    write_trunk(open_plain_base(random_base), tmp_path / "ours", algo, amax, {"name": "modelopt"})
    theirs, ours = Checkpoint(folder), Checkpoint(tmp_path / "ours")
    assert sorted(ours.names) == sorted(theirs.names)
    for name in ours.names:
        a, b = ours.load(name), theirs.load(name)
        assert a.dtype == b.dtype and torch.equal(a.float(), b.float().reshape(a.shape)), name
    statements = [json.loads((f / "config.json").read_text())["quantization_config"]
                  for f in (tmp_path / "ours", folder)]  # fmt: skip
    assert statements[0]["quant_algo"] == statements[1]["quant_algo"]
