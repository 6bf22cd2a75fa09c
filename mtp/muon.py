"""Muon for matrices and for stacks of matrices: momentum, made orthogonal by Newton-Schulz.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (the quintic iteration and
its coefficients); Liu et al. 2025, arXiv 2502.16982 (the factor 0.2 * sqrt(max(rows, columns)),
which gives updates of AdamW's size, so that AdamW's learning rate and weight decay apply).

torch.optim.Muon takes 2-D tensors only, so a head's routed experts, [E, rows, columns], would stay
with AdamW, and they are almost all of its weights. Here each expert is a matrix of its own, all of
them iterated in one batch, and `gate_up_proj`, which stacks two matrices, counts as two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Args:
        params: parameters [..., rows, columns], or groups of them; a group's `num_stacked` says how
            many matrices are stacked along the rows (2 for gate_up_proj).
        lr: learning rate, on AdamW's scale.
        momentum: of the gradient.
        weight_decay: decoupled, as in AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "num_stacked": 1,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step over all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"])
                update = orthogonal_update(update, group["num_stacked"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])


def orthogonal_update(gradient: torch.Tensor, num_stacked: int = 1) -> torch.Tensor:
    """The step that Muon takes for a gradient, before the learning rate.

    Args:
        gradient: [..., rows, columns]; of several processes, sharded or not.
        num_stacked: matrices stacked along the rows.

    Returns:
        Of the same shape, dtype and sharding.
    """
    from torch.distributed.tensor import DTensor, Shard

    if isinstance(gradient, DTensor):
        mesh, placements = gradient.device_mesh, gradient.placements
        if gradient.dim() > 2 and all(p == Shard(0) for p in placements):
            # Whole matrices on each process.
            local = orthogonal_update(gradient.to_local(), num_stacked)
            return DTensor.from_local(
                local, mesh, placements, shape=gradient.shape, stride=gradient.stride()
            )
        from torch.distributed.tensor import distribute_tensor

        full = orthogonal_update(gradient.full_tensor(), num_stacked)
        return distribute_tensor(full, mesh, placements)
    *batch, rows, columns = gradient.shape
    matrices = gradient.reshape(-1, rows // num_stacked, columns)
    if not len(matrices):  # a process may hold none of the experts
        return gradient
    scale = 0.2 * max(rows // num_stacked, columns) ** 0.5
    return (newton_schulz(matrices) * scale).to(gradient.dtype).reshape(*batch, rows, columns)


def newton_schulz(matrices: torch.Tensor) -> torch.Tensor:
    """[N, rows, columns] -> the same with singular values near 1, in BF16 on a GPU."""
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    for _ in range(NUM_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.mT
