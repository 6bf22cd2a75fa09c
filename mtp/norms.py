"""RMSNorm with a zero-centred weight, in one kernel where PyTorch has one.

The arithmetic is that of transformers' norms of these models (float32, the weight applied before
the result is rounded), which spend a pass over the activations on each operation: at the 35B's
sizes several percent of a training step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ZeroCentredNorm(nn.Module):
    """x / rms(x) * (1 + weight), over the last dimension.

    Args:
        weight: [D], zero-centred.
        eps: added to the mean square.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> the same shape and type, by way of float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)


def replace_norms(module: nn.Module, norm_class: type[nn.Module]) -> None:
    """Put a `ZeroCentredNorm` of the same weight in place of every norm of this class."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, norm_class):
                setattr(parent, name, ZeroCentredNorm(child.weight, child.eps))
