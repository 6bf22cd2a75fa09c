"""Which device to run on."""

from __future__ import annotations

import torch

from graft.errors import UsageError, UserError


def pick_device(name: str = "auto") -> torch.device:
    """The device to run on: "auto" is CUDA where there is one.

    Raises:
        UserError: no such device here; a UsageError when torch knows none of that name.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind: type[UserError] = UsageError
    try:
        device = torch.device(name)
        kind = UserError
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise kind("a device of this machine", f"{name!r}: {reason}", "use auto") from error
    return device


def pick_dtype(device: torch.device) -> torch.dtype:
    """What a base is computed in: float32 on a CPU, bfloat16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16
