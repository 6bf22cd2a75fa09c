"""What the trainer knows of a draft, and the MTP head behind that.

The loop in `mtp.train` moves batches, gradients and files; what is drafted, from what, and how good
it is, is the draft's business. A draft is a module, so that data parallelism and sharding can wrap
its `forward`.

Shapes: K speculative positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graft.manifest import HEAD_METADATA, base_fingerprint
from graft.reader import Checkpoint
from mtp.acceptance import Continuations, measure
from mtp.data.batches import Batch
from mtp.head import MTPHead, save_head
from mtp.losses import align, category_weights, chunked_loss, objective_at, position_weights
from mtp.recipe import Recipe
from mtp.router_load import RouterLoad, freeze_routers
from mtp.teacher.source import HiddenSource
from mtp.warm_start import head_from_base


class Draft(nn.Module, ABC):
    """A draft under training. Its parameters are the trained tensors, in float32.

    Attributes:
        name: of the kind of draft, as in `train.draft` of a recipe.
        mark: a file that only a folder of this kind of draft holds.
        num_positions: K.
    """

    name: str
    mark: str
    num_positions: int

    @classmethod
    @abstractmethod
    def min_length(cls, recipe: Recipe) -> int:
        """Tokens that a row needs for every layer to run, and to learn something."""

    @classmethod
    @abstractmethod
    def from_base(
        cls,
        checkpoint: Checkpoint,
        teacher: HiddenSource,
        recipe: Recipe,
        text: Continuations,
        rows: Any = None,
    ) -> Draft:
        """A draft at its start; `rows`, the training split, for one whose shape depends on them."""

    @abstractmethod
    def target_weights(self, batch: Batch) -> torch.Tensor:
        """[K] float32 on the CPU: total weight of the targets that each position predicts."""

    @abstractmethod
    def forward(
        self, batch: Batch, totals: torch.Tensor, progress: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A micro-batch's share of an optimizer step's loss.

        Args:
            batch: rows.
            totals: [K], `target_weights` summed over the whole optimizer step: losses are divided
                by this, so that shares add up to a mean over all targets, not to a mean of means.
            progress: fraction of training that is done, from 0.

        Returns:
            The scalar to minimise, and, detached, this share of some means over the step, [K] each:
            loss_per_position, without position weights; agreement_per_position, how often the
            draft's most probable token is the base's; the same for a second runtime.
        """

    @abstractmethod
    def step_statistics(self) -> dict[str, list[float]]:
        """What else the history shows of this process's passes since the last call."""

    @abstractmethod
    def sharded_modules(self) -> list[nn.Module]:
        """Modules of which each is a unit of FSDP2; the rest of the parameters is one more."""

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Held-out acceptance, as `mtp.acceptance.measure` gives it, of the weights as they are."""

    @abstractmethod
    def export(self, folder: Path, weights: dict[str, torch.Tensor], **metadata: Any) -> None:
        """Write what is served into `folder`; `weights` by parameter name."""


class MTPDraft(Draft):
    """The MTP head, distilled from a teacher.

    Args:
        head: on the teacher's device, float32.
        teacher: the frozen base's hidden states, embedding and `lm_head`.
        recipe: of the loss.
        text: held-out prompts and the base's continuations (`mtp.held_out`).
        fingerprint: of the base.
    """

    name, mark = "mtp", HEAD_METADATA

    def __init__(
        self,
        head: MTPHead,
        teacher: HiddenSource,
        recipe: Recipe,
        text: Continuations,
        fingerprint: dict[str, Any],
    ) -> None:
        super().__init__()
        self.head = head
        self.num_positions = recipe.train.num_speculative_tokens or head.num_layers
        self._teacher, self._text, self._fingerprint = teacher, text, fingerprint
        self._loss, self._runtime = recipe.loss, recipe.train.runtime
        self._position_weights = position_weights(recipe.loss, self.num_positions).to(
            teacher.device
        )
        self._load = RouterLoad(head)
        head.activation_checkpointing = recipe.train.activation_checkpointing

    @classmethod
    def min_length(cls, recipe: Recipe) -> int:
        return recipe.num_steps + 2  # the last step's window then holds one target

    @classmethod
    def from_base(
        cls,
        checkpoint: Checkpoint,
        teacher: HiddenSource,
        recipe: Recipe,
        text: Continuations,
        rows: Any = None,
    ) -> MTPDraft:
        """A head at its warm start."""
        head = head_from_base(checkpoint, recipe.head.num_layers, recipe.head.warm_start)
        head.to(teacher.device)
        if not recipe.head.train_router:
            freeze_routers(head)
        if recipe.train.runtime == "stock":
            head.layers[1:].requires_grad_(False)  # never run
        return cls(head, teacher, recipe, text, base_fingerprint(checkpoint))

    def target_weights(self, batch: Batch) -> torch.Tensor:
        # Step k predicts the token at t from position t-k-2, so it has those of t >= k+2.
        weights = category_weights(self._loss.category_weights, batch.categories).unsqueeze(-1)
        supervised = batch.loss_mask * weights
        return torch.stack([supervised[:, k + 2 :].sum() for k in range(self.num_positions)])

    def forward(
        self, batch: Batch, totals: torch.Tensor, progress: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        teacher = self._teacher
        input_ids = batch.input_ids.to(teacher.device)
        hidden, embeddings = teacher.batch_hidden(batch), teacher.embed(input_ids)
        with teacher.autocast():  # float32 weights; bfloat16 arithmetic on a GPU
            chains = self.head.chains(self._runtime, hidden, embeddings, self.num_positions)
        mask, totals = batch.loss_mask.to(teacher.device), totals.to(teacher.device)
        row_weights = category_weights(self._loss.category_weights, batch.categories)
        objective = objective_at(self._loss, progress)
        loss, statistics = hidden.new_zeros((), dtype=torch.float32), {}
        for name, outputs in chains.items():
            aligned = align(
                [output.to(hidden.dtype) for output in outputs],
                hidden, input_ids, mask, self.num_positions, row_weights.to(teacher.device),
            )  # fmt: skip
            result = chunked_loss(
                aligned, teacher.lm_head, objective, self._position_weights, counts=totals,
                restricted=self._loss.restricted,
            )  # fmt: skip
            loss = loss + result.loss
            prefix = "stock_" if name == "stock" and len(chains) > 1 else ""
            share = aligned.counts() / totals.clamp(min=1e-30)
            statistics[f"{prefix}loss_per_position"] = result.per_position
            statistics[f"{prefix}agreement_per_position"] = result.agreement * share
        return loss, statistics

    def step_statistics(self) -> dict[str, list[float]]:
        return {"expert_load_variation": [layer.variation for layer in self._load.read()]}

    def sharded_modules(self) -> list[nn.Module]:
        return list(self.head.layers)

    def evaluate(self) -> dict[str, Any]:
        metrics = measure(
            self._teacher,
            self.head,
            self._text,
            num_steps=self.num_positions,
            runtime="stock" if self._runtime == "stock" else "routed",
        )
        self._load.read()  # of the prompts, not of training
        self.train()
        return metrics

    def export(self, folder: Path, weights: dict[str, torch.Tensor], **metadata: Any) -> None:
        tensors = {name.removeprefix("head."): tensor for name, tensor in weights.items()}
        save_head(
            self.head, folder, base_fingerprint=self._fingerprint, weights=tensors, **metadata
        )
