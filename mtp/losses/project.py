"""Hidden states to logits, in the precision that the losses are computed in."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def project(hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """[..., H] -> [..., V] logits, in float32 or wider."""
    wide = torch.promote_types(lm_head.dtype, torch.float32)
    if lm_head.is_cuda and lm_head.dtype != wide:
        # Straight from the accumulator: neither a rounding nor another pass over the logits.
        flat = torch.mm(hidden.flatten(0, -2), lm_head.T, out_dtype=wide)
        return flat.unflatten(0, hidden.shape[:-1])
    return F.linear(hidden, lm_head).to(wide)
