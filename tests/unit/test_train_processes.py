"""Two processes against one, and a run that is killed against one that is not.

Through gloo on a CPU. On a machine with two GPUs, through NCCL:
`MTP_TRAIN_DEVICE=cuda python -m pytest tests/unit/test_train_processes.py -k two_processes`
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtp.history import read_history

SCRIPT = Path(__file__).parents[1] / "train_forked.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs of `train_forked.py`."""
    folder = tmp_path_factory.mktemp("forked")
    on = ["cuda", "parallel"] if os.environ.get("MTP_TRAIN_DEVICE") == "cuda" else []
    result = subprocess.run(
        [sys.executable, SCRIPT, folder, *on],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return folder


def state(out):
    folder = max((out.parent / f"{out.name}.run" / "checkpoints").iterdir())
    return {k: v for shard in folder.glob("*.safetensors") for k, v in load_file(shard).items()}


def close(left, right):
    """Whether each tensor differs by less than a thousandth of its own spread."""
    assert left.keys() == right.keys()

    def spread(tensor):
        return tensor.std(correction=0) if tensor.numel() > 1 else tensor.abs().max()

    return all((left[k] - right[k]).abs().max() <= 1e-3 * spread(right[k]) + 1e-9 for k in left)


def weights(out):
    return {k: v for k, v in state(out).items() if k.startswith("weight/")}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_take_the_steps_of_one(runs, optimizer, kind):
    one = read_history(runs / f"{optimizer}-one" / "history.jsonl")
    two = read_history(runs / f"{optimizer}-{kind}" / "history.jsonl")
    assert [r["step"] for r in two] == list(range(1, 7))
    for left, right in zip(one, two, strict=True):
        for exact in ("tokens", "learning_rate"):
            assert left[exact] == right[exact]
        for name in ("loss", "loss_per_position", "gradient_norm"):
            assert right[name] == pytest.approx(left[name], rel=1e-3)
    assert one[0]["loss"] == pytest.approx(two[0]["loss"], rel=1e-5)
    # Negative control: another optimizer's curve is told apart.
    other = "muon" if optimizer == "adamw" else "adamw"
    last = read_history(runs / f"{other}-one" / "history.jsonl")[-1]["loss"]
    assert abs(last / one[-1]["loss"] - 1) > 1e-3


@pytest.mark.parametrize("name", ["adamw-replicated", "adamw-sharded", "moved"])
def test_two_processes_end_with_the_weights_of_one(runs, name):
    """ "moved" took its first steps in two processes, sharded, and the others in one."""
    one = weights(runs / "adamw-one")
    assert close(weights(runs / name), one)
    assert not close(weights(runs / "muon-one"), one)  # negative control


def test_two_processes_share_the_other_drafts_steps_too(runs):
    """Its blocks are drawn by row, so whoever has a row draws the same; some steps have none."""
    one, two = (
        [record["loss"] for record in read_history(runs / f"dspark-{name}" / "history.jsonl")]
        for name in ("one", "sharded")
    )
    assert two == pytest.approx(one, rel=1e-3) and sum(loss > 0 for loss in one) > 2
    assert close(weights(runs / "dspark-sharded"), weights(runs / "dspark-one"))


def test_bug_G2_killed_and_resumed_equals_not_killed(runs):
    assert len(json.loads((runs / "killed.json").read_text())) >= 3
    whole, killed = state(runs / "whole"), state(runs / "killed")
    assert whole.keys() == killed.keys() and all(torch.equal(whole[k], killed[k]) for k in whole)

    def steps(name):
        records = read_history(runs / name / "history.jsonl")
        return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records]

    assert steps("whole") == steps("killed")
    assert [r["step"] for r in steps("killed")] == list(range(1, 41))
    heads = [(runs / name / "mtp.safetensors").read_bytes() for name in ("whole", "killed")]
    assert heads[0] == heads[1]
