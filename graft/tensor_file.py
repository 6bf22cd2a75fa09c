"""Tensors to one safetensors file.

The library raises its own SafetensorError for what the system refused (a full disk, a folder that
may not be written), which nobody who catches OSError sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from graft.errors import UserError

if TYPE_CHECKING:
    import torch


def save_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `path`, with `metadata` beside the format that transformers looks for.

    Raises:
        UserError: the system does not take the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        raise UserError(
            f"{path} written", str(error), "free some space, or choose another place"
        ) from error
