"""Several processes: who shares what, and tensors that are split among them.

`accelerate launch` or `torchrun` start the processes; accelerate makes the process group, wraps a
draft for data parallelism and feeds trackers. FSDP2 is torch's own `fully_shard`, because
accelerate turns it on for GPUs only, and what is tested without one should be what runs there. Both
average gradients over the processes, so a loss is multiplied by their number first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graft.errors import UsageError, UserError
from mtp.draft import Draft

if TYPE_CHECKING:
    from accelerate import Accelerator

TRACKERS = ("tensorboard", "wandb")
NOT_OURS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # accelerate would wrap a draft in these


def start_processes(device: torch.device, tracker: str | None, folder: Path) -> Accelerator:
    """The accelerator of this process.

    Args:
        device: where this process computes.
        tracker: "tensorboard", "wandb" or None.
        folder: where TensorBoard writes.

    Raises:
        UserError: an unknown tracker, or one that is not installed; or accelerate's own
            configuration asks for another kind of sharding.
    """
    from accelerate import Accelerator
    from accelerate.tracking import get_available_trackers

    if tracker is not None and tracker not in TRACKERS:
        raise UsageError(f"--tracker {' or '.join(TRACKERS)}", tracker, "choose one of them")
    if tracker is not None and tracker not in map(str, get_available_trackers()):
        raise UserError(f"{tracker} to be installed", "none", f"run `pip install {tracker}`")
    # Said outright, because what `accelerate config` once wrote would hold instead.
    accelerator = Accelerator(
        cpu=device.type == "cpu", log_with=tracker, project_dir=folder,
        mixed_precision="no", dynamo_backend="no",
    )  # fmt: skip
    if (kind := accelerator.distributed_type.value) in NOT_OURS:
        raise UserError(
            "processes that accelerate only starts",
            f"its configuration for {kind}",
            "launch with --multi_gpu or with torchrun, and shard with --shard",
        )
    return accelerator


@contextlib.contextmanager
def tracking(accelerator: Accelerator, folder: Path, step: int, record: Any) -> Iterator[None]:
    """Trackers run inside, if any was asked for, and are closed whatever happens.

    A resumed run is a new one for wandb, of the same name; TensorBoard hides what a killed run
    wrote after the checkpoint.

    Args:
        accelerator: from `start_processes`.
        folder: the run's; trackers keep their files in it.
        step: finished steps.
        record: the recipe, for wandb; TensorBoard has recipe.toml beside it.

    Raises:
        UserError: wandb does not start, because nobody is logged in, say.
    """
    name = str(accelerator.log_with[0]) if accelerator.log_with else None
    if name == "tensorboard":
        accelerator.init_trackers(name, init_kwargs={name: {"purge_step": step + 1}})
    elif name is not None:
        run = folder.name.removesuffix(".run")
        options = {"name": run, "group": run, "dir": str(folder)}
        try:
            accelerator.init_trackers("mtp-graft", config=record, init_kwargs={name: options})
        except Exception as error:
            if not type(error).__module__.startswith(name):
                raise
            raise UserError(
                f"{name} to start a run",
                str(error).splitlines()[0],
                "log in with `wandb login`, or set WANDB_MODE=offline",
            ) from error
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.trackers.clear()


def local_device(device: str) -> str:
    """`device`, or the GPU of this process when several were launched and none was named."""
    rank = os.environ.get("LOCAL_RANK")
    if device in ("auto", "cuda") and rank is not None and torch.cuda.is_available():
        return f"cuda:{rank}"
    return device


def wrap(accelerator: Accelerator, draft: Draft, *, shard: bool) -> nn.Module:
    """`draft` as the processes run it: replicated, or with parameters split among them (FSDP2)."""
    if accelerator.num_processes == 1:
        return draft
    if not shard:
        return accelerator.prepare(draft)  # type: ignore[no-any-return]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in draft.sharded_modules():
        fully_shard(module, mesh=mesh)
    return fully_shard(draft, mesh=mesh)


@contextlib.contextmanager
def gradient_exchange(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Backward passes inside exchange gradients among the processes only when `wanted`."""
    if wanted:
        yield
    elif hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Parameters of an FSDP2 module are whole inside; for any other module nothing changes."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def summed(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's sum over the processes, on the CPU in all of them."""
    if accelerator.num_processes > 1:
        tensor = accelerator.reduce(tensor.to(accelerator.device), "sum")
    return tensor.cpu()


def agreed(accelerator: Accelerator, value: Any) -> Any:
    """The main process's value, in all processes."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def gathered(accelerator: Accelerator, values: list[Any]) -> list[Any]:
    """All processes' lists, joined."""
    from accelerate.utils import gather_object

    return gather_object(values) if accelerator.num_processes > 1 else values


def gather_weights(module: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every weight in BF16 in host memory, by name; every process must call this.

    Args:
        module: sharded or not.
        keep: False in processes that only help to gather; they get an empty dict.
    """
    weights = {}
    for name, parameter in module.named_parameters():
        tensor = whole(parameter).to("cpu", torch.bfloat16)
        if keep:
            weights[name] = tensor
    return weights


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; for a sharded one every process must call this."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`full` on the device of `like`, and sharded as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(like, DTensor) and full.shape == like.shape:
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements)
    return full.to(like.device)


@torch.no_grad()
def copy_into(target: torch.Tensor, full: torch.Tensor) -> None:
    """Set a parameter, sharded or not, to `full`."""
    target.copy_(split_like(full.to(target.dtype), target))


@contextlib.contextmanager
def rounded_to_bfloat16(module: nn.Module) -> Iterator[None]:
    """Weights hold what BF16 holds inside, and their float32 values again afterwards.

    The float32 values wait in host memory, so that a GPU needs no room for a second copy.
    """
    with torch.no_grad():
        masters = {}
        for name, parameter in module.named_parameters():
            local = _local(parameter)
            masters[name] = local.to("cpu", copy=True)
            local.copy_(local.to(torch.bfloat16))
        try:
            yield
        finally:
            for name, parameter in module.named_parameters():
                _local(parameter).copy_(masters[name])


def _local(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
