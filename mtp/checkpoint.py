"""Resume state: weights and optimizer state in float32, in full, with the place in the run.

Safetensors and JSON only, so that reading one runs no code. Not the format of a finished head: that
is a head folder, in BF16.

A checkpoint is written beside its place, shard by shard, and renamed when all of it is on disk;
the JSON file names the shards and their sizes. At most one tensor or SHARD_BYTES are in host memory
at once. With P trained parameters and AdamW it takes 12 P bytes (40 GB at 35B-A3B with four
layers), and while one is written the older ones are still there: `disk_bytes` says what a run
needs.

Batches, learning rate and random numbers are functions of the step's number (`mtp.schedule`,
`mtp.train`), so the number is all that is kept of them; and a checkpoint is only written between
optimizer steps, so no accumulated gradient is part of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from graft.errors import UserError
from graft.index import read_json, write_json
from graft.staging import staged_folder
from graft.tensor_file import save_tensors
from mtp.parallel import copy_into, split_like, whole

SCHEMA_VERSION = 1
STATE = "state.json"
SHARD_BYTES = 2**30


def save_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    *,
    write: bool = True,
) -> None:
    """Write `folder`, which appears only once it is complete.

    Args:
        folder: to make.
        module: its parameters are kept.
        optimizers: their states are kept.
        state: what else is kept, as JSON.
        write: False in all processes but one; they only take part in gathering shards.
    """
    tensors = _named_tensors(module, optimizers)
    if not write:
        for _, tensor in tensors:
            whole(tensor)
        return
    with staged_folder(folder, overwrite=True) as staging:
        shards: dict[str, int] = {}
        pending: dict[str, torch.Tensor] = {}
        size = 0

        def flush() -> None:
            name = f"state-{len(shards) + 1:05d}.safetensors"
            save_tensors(pending, staging / name)
            shards[name] = (staging / name).stat().st_size
            pending.clear()

        for name, tensor in tensors:
            pending[name] = whole(tensor).cpu().contiguous()
            size += pending[name].nbytes
            if size >= SHARD_BYTES:
                flush()
                size = 0
        if pending:
            flush()
        write_json(
            staging / STATE, {"schema_version": SCHEMA_VERSION, "shards": shards, "state": state}
        )


def read_state(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` kept as JSON.

    Raises:
        UserError: not a checkpoint, one of another version, or one that lost something.
    """
    contents = read_json(folder / STATE)
    expected, action = f"a whole checkpoint in {folder}", "remove that folder and resume again"
    if contents.get("schema_version") != SCHEMA_VERSION:
        found = f"schema_version {contents.get('schema_version')!r}"
        raise UserError(expected, found, "resume with the version that wrote it")
    shards, state = contents.get("shards"), contents.get("state")
    if not isinstance(shards, dict) or not isinstance(state, dict):
        raise UserError(expected, f"{STATE} without shards or state", action)
    for name, size in shards.items():
        found_size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found_size != size:
            raise UserError(expected, f"{name} of {found_size} bytes, not {size}", action)
    return state


def load_checkpoint(
    folder: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Set the parameters of `module` and the states of `optimizers` to those of a checkpoint.

    Raises:
        UserError: tensors of another draft, or a shard that is none.
    """
    parameters = dict(module.named_parameters())
    places = {
        name: (number, index)
        for number, optimizer in enumerate(optimizers)
        for index, name in enumerate(_names(module, optimizer))
    }
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimizers]
    missing = {name for name in parameters if name in places or parameters[name].requires_grad}
    for key, tensor in _stored(folder):
        kind, _, name = key.partition("/")
        target = parameters.get(name)
        if target is None or (tensor.dim() and tensor.shape != target.shape):
            raise UserError(f"tensors of this draft in {folder}", key, "start a new run")
        if kind == "weight":
            copy_into(target, tensor)
            missing.discard(name)
        else:
            number, index = places[name]
            states[number].setdefault(index, {})[kind] = split_like(tensor, target)
    if missing:
        raise UserError(
            f"every weight in {folder}", f"no {', '.join(sorted(missing))}", "start a new run"
        )
    for optimizer, values in zip(optimizers, states, strict=True):
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": values, "param_groups": groups})


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, one at a time."""
    for shard in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(shard, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise UserError(
                f"a whole checkpoint in {folder}",
                f"{shard.name}: {error}",
                "remove that folder and resume again",
            ) from error


def disk_bytes(module: nn.Module, num_checkpoints: int) -> int:
    """Most bytes that a run has on disk at once: the kept checkpoints and one more that is being
    written (weights and two moments in float32), and for each the best head of then (BF16). The
    finished head comes when no checkpoint is being written."""
    num_parameters = sum(p.numel() for p in module.parameters())
    return num_parameters * (12 + 2) * (num_checkpoints + 1)


def require_disk(folder: Path, needed: int) -> None:
    """Refuse a run that would fill the disk.

    Raises:
        UserError: `folder`'s file system has less than `needed` bytes free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{needed / 1e9:.1f} GB free at {folder} for checkpoints and heads",
            f"{free / 1e9:.1f} GB",
            "free some, or lower train.keep_checkpoints, or set train.checkpoint_every = 0",
        )


def _named_tensors(
    module: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor to keep, as kind/parameter; gathered by the caller one at a time."""
    for name, parameter in module.named_parameters():
        yield f"weight/{name}", parameter
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for name, parameter in zip(_names(module, optimizer), parameters, strict=True):
            for kind, value in optimizer.state[parameter].items():
                yield f"{kind}/{name}", value


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of an optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
