"""Optimizers of a draft, by the recipe's name."""

from __future__ import annotations

import torch
from torch import nn

from graft.errors import UserError
from mtp.recipe import TrainRecipe


def build_optimizers(module: nn.Module, settings: TrainRecipe) -> list[torch.optim.Optimizer]:
    """The optimizers that together hold every trained parameter once.

    Raises:
        UserError: an unknown name.
    """
    if settings.optimizer not in ("adamw",):
        raise UserError("optimizer adamw", repr(settings.optimizer), "correct the recipe")
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [adamw(parameters, settings)]


def adamw(parameters: list[nn.Parameter], settings: TrainRecipe) -> torch.optim.AdamW:
    """AdamW, fused on a GPU. A CPU keeps torch's plain form."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=True if parameters[0].is_cuda else None,
    )


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every group; it is a function of the step, not a state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
