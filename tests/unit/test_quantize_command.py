"""`mtp quantize` as a whole on a base of 16 words: report, gate, distillation with quantizers."""

import json
from dataclasses import replace

import pytest
import torch
from training import tiny_recipe, write_training_base, write_training_data
from typer.testing import CliRunner

from graft.manifest import HeadFolder, base_fingerprint
from graft.reader import Checkpoint
from mtp.head import load_head, save_head
from mtp.recipe import QuantizeRecipe
from mtp.teacher import Teacher
from mtp.warm_start import head_from_base
from quantize import gate
from quantize.calibration import calibrate
from quantize.command import Settings, quantize
from quantize.gate import GateFailed
from quantize.packing import fake_quantize
from quantize.qad import _backend


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    base = write_training_base(folder / "base")
    write_training_data(folder / "data", base)
    (folder / "head").mkdir()
    torch.manual_seed(0)
    save_head(
        head_from_base(Checkpoint(base), 2, "last"), folder / "head",
        base_fingerprint=base_fingerprint(Checkpoint(base)), provenance={},
    )  # fmt: skip
    return folder


def run(line, out, settings, **recipe):
    recipe = replace(tiny_recipe(**recipe), quantize=QuantizeRecipe(calibration_tokens=200))
    return quantize(
        line / "head", line / "base", line / "data", out, recipe, settings, device="cpu"
    )


def test_the_report_has_both_measurements_and_their_difference(line, tmp_path):
    result = run(line, tmp_path / "out", Settings(max_drop=10.0))
    difference = result["after"]["mean_accepted"] - result["before"]["mean_accepted"]
    assert result["difference"]["mean_accepted"] == pytest.approx(difference)
    assert result["passed"] and result["scheme"] == "w4a4" and "qad" not in result
    assert [layer["steps"] for layer in result["coverage"]] == [[0], [1]]
    assert result["checks"]["matrices_compared"] == 12
    assert result["bytes_after"] < result["bytes_before"]
    written = HeadFolder(tmp_path / "out")
    assert written.form == "nvfp4-modelopt"
    assert written.metadata["acceptance"] == result["after"]
    assert sum(info.nbytes for info in written.infos()) == result["bytes_after"]


def test_a_head_that_lost_too_much_is_not_written(line, tmp_path):
    with pytest.raises(GateFailed, match="a drop of at most -10") as caught:
        run(line, tmp_path / "out", Settings(max_drop=-10.0))
    assert not (tmp_path / "out").exists() and (line / "head").exists()
    assert caught.value.result["passed"] is False
    assert "--qad" in caught.value.action


def test_qad_trains_when_the_gate_fails_and_measures_again(line, tmp_path, monkeypatch):
    verdicts = iter([True, False, False])
    monkeypatch.setattr("quantize.command.drops_too_far", lambda *_: next(verdicts))
    result = run(line, tmp_path / "out", Settings(qad_steps=6))
    assert result["passed"] and result["qad"]["steps"] == 6
    written = HeadFolder(tmp_path / "out")
    assert written.metadata["provenance"]["qad"]["steps"] == 6
    assert not list((tmp_path / "out").glob("*/"))
    before, after = load_head(line / "head"), load_head(tmp_path / "out")
    moved = (before.fc.weight - after.fc.weight).abs().max()
    assert moved > 1e-3  # fc is never quantized, so it was trained
    assert gate.drops_too_far is not None


def test_experts_compute_with_what_will_be_stored_while_they_learn(line):
    teacher = Teacher.load(line / "base", device="cpu")
    head = load_head(line / "head", experts_implementation="eager")
    plain = load_head(line / "head", experts_implementation="eager")
    ids = torch.arange(16)[None]
    hidden, embeddings = teacher.hidden(ids).float(), teacher.embed(ids).float()
    with _backend(torch.device("cpu")) as backend:
        calibrate(head, lambda m: m.chain(hidden, embeddings), "w4a16", backend=backend)
        found = head.chain(hidden, embeddings)
        with torch.no_grad():
            for layer in plain.layers:
                for stack in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                    for weight in stack:
                        weight.copy_(fake_quantize(weight, weight.abs().max()))
            wanted = plain.chain(hidden, embeddings)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        found[-1].square().sum().backward()
    gradient = head.layers[0].mlp.experts.gate_up_proj.grad
    assert gradient is not None and gradient.abs().sum() > 0
    assert not torch.allclose(wanted[-1], load_head(line / "head").chain(hidden, embeddings)[-1])


def test_the_command_reports_a_failed_gate_and_exits_with_1(line, tmp_path):
    from mtp.cli import app

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[eval]\nnum_prompts = 2\nmax_prompt_tokens = 40\nnum_tokens = 8\n"
        "[quantize]\ncalibration_tokens = 200\n"
    )
    arguments = [
        "quantize", "--head", line / "head", "--base", line / "base", "--data", line / "data",
        "--out", tmp_path / "out", "--recipe", recipe, "--report", tmp_path / "report.json",
        "--device", "cpu", "--scheme", "w4a16", "--json",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [*map(str, arguments), "--max-drop", "-10"])
    assert result.exit_code == 1 and isinstance(result.exception, GateFailed)
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is False
    result = CliRunner().invoke(app, [*map(str, arguments), "--max-drop", "10"])
    assert result.exit_code == 0, result.exception
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] and report["scheme"] == "w4a16"
    assert HeadFolder(tmp_path / "out").form == "nvfp4-modelopt-w4a16"
