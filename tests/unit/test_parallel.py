"""What accelerate's own configuration may decide of a training, which is nothing of its numbers."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from graft.errors import UserError
from mtp.parallel import start_processes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    """accelerate keeps one state a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_arithmetic_is_the_recipes_and_not_that_of_accelerates_config(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    started = start_processes(CPU, None, tmp_path)
    assert started.mixed_precision == "no"
    assert started.state.dynamo_plugin.backend.value == "NO"
    AcceleratorState._reset_state(reset_partial_state=True)
    # Negative control: left to itself it takes both.
    alone = Accelerator(cpu=True)
    assert alone.mixed_precision == "bf16" and alone.state.dynamo_plugin.backend.value == "EAGER"


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_another_kind_of_sharding_is_refused(monkeypatch, tmp_path, kind):
    assert start_processes(CPU, None, tmp_path).num_processes == 1
    found = DistributedType[kind]
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda _: found))
    with pytest.raises(UserError, match=f"{kind}.*--shard"):
        start_processes(CPU, None, tmp_path)
