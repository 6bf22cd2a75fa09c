"""What `mtp quantize` refuses, and that it does so before the hours of work and in one line."""

from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from tiny import write_base, write_tiny_head
from training import tiny_recipe, write_training_base, write_training_data
from typer.testing import CliRunner

from graft.errors import UserError
from graft.manifest import HeadFolder, base_fingerprint, write_head
from graft.reader import Checkpoint
from mtp.acceptance import AcceptanceCounts
from mtp.head import save_head
from mtp.recipe import EvalRecipe, QuantizeRecipe
from mtp.warm_start import head_from_base
from quantize.command import Settings, quantize
from quantize.twin import dequantize

GATE_UP = "mtp.layers.1.mlp.experts.gate_up_proj"
DOWN = "mtp.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """A base and data."""
    folder = tmp_path_factory.mktemp("line")
    base = write_training_base(folder / "base")
    write_training_data(folder / "data", base)
    return folder


def write(folder, line, change=None):
    """A head of two layers whose tensors `change` has changed."""
    folder.mkdir()
    base = Checkpoint(line / "base")
    fingerprint = base_fingerprint(base)
    save_head(head_from_base(base, 2, "last"), folder, base_fingerprint=fingerprint, provenance={})
    source = HeadFolder(folder)
    tensors = source.load_all()
    if change:
        change(tensors)
    write_head(folder, tensors, source.metadata)
    return folder


def run(head, line, out, settings=Settings(max_drop=10.0), **evaluation):
    recipe = replace(
        tiny_recipe(),
        quantize=QuantizeRecipe(calibration_tokens=200),
        eval=EvalRecipe(
            **{"num_prompts": 2, "max_prompt_tokens": 40, "num_tokens": 8} | evaluation
        ),
    )
    return quantize(head, line / "base", line / "data", out, recipe, settings, device="cpu")


@pytest.fixture
def no_work(monkeypatch):
    """The base must not be loaded: what is refused is refused before."""
    monkeypatch.setattr("quantize.command.Teacher.load", lambda *_, **__: pytest.fail("loaded"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [DOWN, "mtp.fc.weight"])
def test_weights_that_are_not_finite_are_named(line, tmp_path, no_work, name, value):
    head = write(tmp_path / "head", line, lambda tensors: tensors[name].view(-1)[3:4].fill_(value))
    with pytest.raises(UserError, match=f"{name} has values that are not finite"):
        run(head, line, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_without_all_of_its_tensors_is_refused(line, tmp_path, no_work):
    head = write(tmp_path / "head", line, lambda tensors: tensors.pop(DOWN))
    with pytest.raises(UserError, match="down_proj is missing"):
        run(head, line, tmp_path / "out")


def test_finite_weights_that_overflow_are_a_user_s_error(line, tmp_path):
    def change(tensors):
        tensors["mtp.layers.1.self_attn.o_proj.weight"].fill_(3e38)

    before = torch.nn.functional.linear
    with pytest.raises(UserError, match="finite weights and inputs"):
        run(write(tmp_path / "head", line, change), line, tmp_path / "out")
    assert torch.nn.functional.linear is before  # modelopt's would stay: it has no `finally`


def test_a_layer_whose_experts_are_all_zero_has_sound_scales(line, tmp_path):
    head = write(tmp_path / "head", line, lambda tensors: tensors[GATE_UP].zero_())
    assert run(head, line, tmp_path / "out")["checks"]["num_matrices"] == 2 * 4 * 3


def test_a_limit_that_is_no_number_is_refused():
    with pytest.raises(UserError, match="max-drop"):
        Settings(max_drop=float("nan"))


@pytest.mark.parametrize(
    ("evaluation", "named"),
    [({"num_prompts": 1}, "at least 2 held-out prompts"), ({"num_tokens": 1}, "num_tokens = 1")],
)
def test_a_gate_without_evidence_is_not_passed(line, tmp_path, evaluation, named):
    head = write(tmp_path / "head", line)
    with pytest.raises(UserError, match=named):
        run(head, line, tmp_path / "out", **evaluation)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_refused_before_the_work(line, tmp_path, no_work, monkeypatch):
    head = write(tmp_path / "head", line)
    monkeypatch.setattr("graft.place.free_bytes", lambda _: 1000)
    with pytest.raises(UserError, match="free space"):
        run(head, line, tmp_path / "out")


def test_a_disk_that_fills_meanwhile_is_one_line(line, tmp_path, monkeypatch):
    head = HeadFolder(write(tmp_path / "head", line))

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UserError, match="No space left"):
        write_head(tmp_path, head.load_all(), head.metadata)


def test_the_twin_of_a_broken_head_is_refused(tmp_path):
    base = write_base(tmp_path / "base")
    source = HeadFolder(write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt"))
    tensors = source.load_all()
    del tensors["mtp.layers.0.mlp.experts.1.up_proj.weight_scale_2"]
    write_head(source.folder, tensors, source.metadata)
    with pytest.raises(UserError, match="weight_scale_2 is missing"):
        dequantize(source.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nan_in_a_base_is_named_and_leaves_nothing(tmp_path):
    from safetensors.torch import save_file

    from quantize.trunk import quantize_trunk

    base = write_base(tmp_path / "base", num_shards=1, index=False)
    checkpoint = Checkpoint(base)
    tensors = {name: checkpoint.load(name) for name in checkpoint.names}
    broken = next(name for name in tensors if name.endswith("experts.2.up_proj.weight"))
    tensors[broken].view(-1)[5] = torch.nan
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(UserError, match=r"experts\.2\.(gate|up)_proj"):
        quantize_trunk(base, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


Refusal = namedtuple("Refusal", "arguments message")
REFUSALS = [
    Refusal("--trunk --base b --out o --algorithm mse", "--trunk has no use for --algorithm"),
    Refusal("--trunk --base b --out o --dequantize", "--trunk has no use for --dequantize"),
    Refusal("--trunk --base b --out o --head h --qad 3", "no use for --head, --qad"),
    Refusal("--trunk --base b", "--trunk needs --out"),
    Refusal("--dequantize --head h", "--dequantize needs --out"),
    Refusal("--dequantize --head h --out o --max-drop 1", "no use for --max-drop"),
    Refusal("--head h --base b", "--base and --data are needed"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.arguments)
def test_options_that_would_be_ignored_are_wrong_usage(refusal):
    from mtp.cli import app

    result = CliRunner().invoke(app, ["quantize", *refusal.arguments.split()])
    assert result.exit_code == 2
    assert refusal.message in " ".join(result.output.replace("│", " ").split())


def test_the_twin_prints_json(tmp_path):
    import json

    from mtp.cli import app

    head = write_tiny_head(tmp_path / "head", write_base(tmp_path / "base"), form="nvfp4-modelopt")
    arguments = ["--dequantize", "--head", str(head), "--out", str(tmp_path / "twin"), "--json"]
    result = CliRunner().invoke(app, ["quantize", *arguments])
    assert result.exit_code == 0, result.exception
    report = json.loads(result.stdout)
    twin = HeadFolder(tmp_path / "twin")
    assert report["schema_version"] == 1 and report["form_before"] == "nvfp4-modelopt"
    assert report["bytes_after"] == sum(info.nbytes for info in twin.infos())


@pytest.mark.parametrize(("unseen", "said"), [([], False), ([3, 5], True)])
def test_experts_that_no_token_reached_are_told_to_people_too(monkeypatch, unseen, said):
    from mtp.cli import app

    metrics = AcceptanceCounts(2, 10, [5, 3]).as_dict() | {"by_category": {}, "num_prompts": 2}
    difference = {"mean_accepted": 0.0, "mean_accepted_interval": [-0.1, 0.1]}
    report = {
        "before": metrics, "after": metrics, "difference": difference, "bytes_before": 2,
        "bytes_after": 1, "coverage": [{"layer": 0, "never_routed": unseen}],
    }  # fmt: skip
    monkeypatch.setattr("quantize.command.quantize", lambda *_, **__: report)
    result = CliRunner().invoke(
        app, ["quantize", "--head", "h", "--base", "b", "--data", "d", "--out", "o"]
    )
    assert result.exit_code == 0, result.exception
    words = " ".join(result.output.split())
    assert ("2 experts saw no token" in words) == said
