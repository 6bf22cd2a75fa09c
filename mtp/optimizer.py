"""Which optimizer updates which parameter of a draft, by the recipe's name."""

from __future__ import annotations

import torch
from torch import nn

from mtp.muon import Muon
from mtp.recipe import TrainRecipe

# Parts of a name that keep a matrix with AdamW: routers and gates are classifiers, not maps.
NOT_MUON = ("norm", "mlp.gate.weight", "shared_expert_gate", "embed", "lm_head", "markov_w1",
            "confidence_head")  # fmt: skip


def build_optimizers(module: nn.Module, settings: TrainRecipe) -> list[torch.optim.Optimizer]:
    """The optimizers that together hold every trained parameter once.

    "adamw" takes all; "muon" takes matrices and stacks of them, and leaves vectors, routers and
    gates to AdamW.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    muon = {
        name: parameter
        for name, parameter in trained.items()
        if settings.optimizer == "muon" and is_muon(name, parameter)
    }
    optimizers: list[torch.optim.Optimizer] = []
    if muon:
        stacked = [p for name, p in muon.items() if name.endswith("gate_up_proj")]
        single = [p for name, p in muon.items() if not name.endswith("gate_up_proj")]
        groups = [{"params": single, "num_stacked": 1}, {"params": stacked, "num_stacked": 2}]
        optimizers.append(
            Muon(
                [group for group in groups if group["params"]],
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
            )
        )
    rest = [parameter for name, parameter in trained.items() if name not in muon]
    return [*optimizers, adamw(rest, settings)]


def is_muon(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon is for a parameter of this name and shape."""
    return parameter.dim() in (2, 3) and not any(part in name for part in NOT_MUON)


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
