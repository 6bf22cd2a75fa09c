"""Where a training run is, and what its loop works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mtp.draft import Draft
from mtp.recipe import Recipe
from mtp.run_folder import RunFolder
from mtp.schedule import StepBatches

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(kw_only=True)
class TrainState:
    """Where a run is; kept in every checkpoint.

    step, tokens, seconds: finished optimizer steps, tokens seen in them, time they took.
    before: acceptance of the warm start.
    best: step and acceptance of the best head so far.
    num_without_best: evaluations since acceptance last rose.
    measured: the last step that was evaluated.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    before: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    num_without_best: int = 0
    measured: int = -1


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the loop works with. `model` is `draft` as wrapped for several processes."""

    recipe: Recipe
    draft: Draft
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    batches: StepBatches
    rows: Any
    run: RunFolder
    accelerator: Accelerator
    provenance: dict[str, Any]

    def stalled(self, state: TrainState) -> bool:
        """Whether acceptance has not improved for `patience` evaluations."""
        patience = self.recipe.train.patience
        return bool(patience) and state.num_without_best >= patience
