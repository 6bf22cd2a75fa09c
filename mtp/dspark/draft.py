"""A DSpark draft behind the trainer's interface: the same loop, data, teachers and resume as the
MTP head's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from graft.layout import base_tensor_names
from graft.manifest import base_fingerprint
from graft.reader import Checkpoint
from mtp.acceptance import Continuations
from mtp.data.batches import Batch
from mtp.draft import Draft
from mtp.dspark.anchors import Blocks, choose_blocks, require_blocks
from mtp.dspark.config import choose_mask_token, config_for_base
from mtp.dspark.evaluate import Measured, measure
from mtp.dspark.export import METADATA, save_draft
from mtp.dspark.loss import SlotTerms, base_targets, slot_terms
from mtp.dspark.model import DSparkModel
from mtp.dspark.vocabulary import DraftVocabulary, choose_vocabulary, supervised_counts
from mtp.losses import category_weights
from mtp.recipe import Recipe
from mtp.teacher.source import HiddenSource


class DSparkDraft(Draft):
    """A block drafted at once, distilled from a base.

    Args:
        model: on the teacher's device, float32.
        vocabulary: what it can say.
        base: the base's checkpoint.
        teacher: its hidden states, embedding and `lm_head`.
        recipe: of the loss.
        text: held-out prompts and the base's continuations, with the aux layers' states.
    """

    name, mark = "dspark", METADATA

    def __init__(
        self,
        model: DSparkModel,
        vocabulary: DraftVocabulary,
        base: Checkpoint,
        teacher: HiddenSource,
        recipe: Recipe,
        text: Continuations,
    ) -> None:
        super().__init__()
        self.model = model
        self.num_positions = model.config.block_size
        self._base, self._fingerprint = base, base_fingerprint(base)
        self._teacher, self._text, self._settings = teacher, text, recipe.dspark
        self._category_weights = recipe.loss.category_weights
        self._kept_rows = teacher.lm_head[vocabulary.kept.to(teacher.device)]
        self._draft_ids = vocabulary.draft_ids.to(teacher.device)
        self._measured = Measured(
            source=teacher, model=model, vocabulary=vocabulary,
            num_slots=recipe.dspark.num_speculative_tokens,
        )  # fmt: skip
        slots = torch.arange(self.num_positions, device=teacher.device)
        self._decay = torch.exp(-slots / recipe.dspark.decay)
        model.lm_head.requires_grad_(recipe.dspark.train_lm_head)
        model.activation_checkpointing = recipe.train.activation_checkpointing

    @classmethod
    def min_length(cls, recipe: Recipe) -> int:
        return 1  # a row without room for a block is no target

    @classmethod
    def from_base(
        cls,
        checkpoint: Checkpoint,
        teacher: HiddenSource,
        recipe: Recipe,
        text: Continuations,
        rows: Any = None,
    ) -> DSparkDraft:
        """A draft at its start; the rows say which tokens it can draft."""
        settings, text_config = recipe.dspark, checkpoint.text_config
        mask_token = choose_mask_token(checkpoint.folder, text_config, settings.mask_token_id)
        config = config_for_base(text_config, settings, mask_token)
        require_blocks(rows, config.block_size)
        counts = supervised_counts(rows, config.vocab_size)
        vocabulary = choose_vocabulary(counts, config.draft_vocab_size)
        model = DSparkModel(config)
        # The base's norms are zero-centred, the draft's are not.
        norm = 1 + checkpoint.load(base_tensor_names(checkpoint).final_norm).float()
        rows_of_output = teacher.lm_head[vocabulary.kept.to(teacher.device)]
        model.initialize(rows_of_output.float().cpu(), norm)
        return cls(model.to(teacher.device), vocabulary, checkpoint, teacher, recipe, text)

    def blocks(self, batch: Batch) -> Blocks:
        """The blocks of a batch: drawn by the seed that the trainer set for this step."""
        return choose_blocks(
            batch.loss_mask, batch.lengths, batch.rows,
            block_size=self.num_positions, max_anchors=self._settings.max_anchors,
            seed=torch.initial_seed(),
        )  # fmt: skip

    def target_weights(self, batch: Batch) -> torch.Tensor:
        weights = category_weights(self._category_weights, batch.categories)
        return (self.blocks(batch).live * weights[:, None, None]).sum((0, 1))

    def forward(
        self, batch: Batch, totals: torch.Tensor, progress: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        teacher, config = self._teacher, self.model.config
        device, blocks = teacher.device, self.blocks(batch)
        states = teacher.batch_hidden(batch, config.aux_layers)
        aux, final = states.split([states.shape[-1] - config.hidden_size, config.hidden_size], -1)
        tokens = torch.full(blocks.live.shape, config.mask_token_id)
        tokens[..., 0] = batch.input_ids.gather(1, blocks.anchors)
        with teacher.autocast():  # float32 weights; bfloat16 arithmetic on a GPU
            embeddings = teacher.embed(tokens.to(device))
            hidden = self.model(aux.float(), embeddings.float(), blocks.anchors)
            terms, rows, slots = self._terms(batch, blocks, hidden, final)
        weights = category_weights(self._category_weights, batch.categories).to(device)[rows]
        live = torch.ones_like(weights) if blocks.live.any() else torch.zeros_like(weights)
        return self._reduced(terms, weights * live, slots, totals.to(device))

    def _terms(
        self, batch: Batch, blocks: Blocks, hidden: torch.Tensor, final: torch.Tensor
    ) -> tuple[SlotTerms, torch.Tensor, torch.Tensor]:
        """Live slots against the base, with the rows [N] and slots [N] that they are of.

        Without a live slot the first one stands in, so that every weight gets a gradient, of zero.
        """
        live = blocks.live.clone()
        if not live.any():
            live[0, 0, 0] = True
        rows, numbers, slots = live.nonzero(as_tuple=True)
        width = batch.input_ids.shape[1]
        at = (blocks.anchors[rows, numbers] + slots).clamp(max=width - 1)
        places, positions = (rows * width + at).unique(return_inverse=True)
        device = hidden.device
        targets = base_targets(final.flatten(0, 1)[places.to(device)], self._teacher.lm_head)
        terms = slot_terms(
            self.model, hidden[live.to(device)], batch.input_ids[rows, at].to(device),
            targets, positions.to(device), self._kept_rows, self._draft_ids,
        )  # fmt: skip
        return terms, rows.to(device), slots.to(device)

    def _reduced(
        self, terms: SlotTerms, weights: torch.Tensor, slots: torch.Tensor, totals: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings = self._settings
        distance = settings.ce * terms.ce + settings.tv * terms.tv
        value = distance + settings.confidence * terms.confidence
        loss = (value * weights * self._decay[slots]).sum() / totals.sum().clamp(min=1e-30)

        def means(values: torch.Tensor) -> torch.Tensor:
            sums = torch.zeros_like(totals).index_add_(0, slots, values.detach() * weights)
            return sums / totals.clamp(min=1e-30)

        return loss, {
            "loss_per_position": means(distance),
            "agreement_per_position": means(terms.agrees),
            "overlap_per_position": means(1 - terms.tv),
            "confidence_loss_per_position": means(terms.confidence),
        }

    def step_statistics(self) -> dict[str, list[float]]:
        return {}

    def sharded_modules(self) -> list[nn.Module]:
        return list(self.model.layers)

    def evaluate(self) -> dict[str, Any]:
        metrics = measure(self._measured, self._text)
        self.train()
        return metrics

    def export(self, folder: Path, weights: dict[str, torch.Tensor], **metadata: Any) -> None:
        save_draft(
            folder,
            self.model.config,
            {name.removeprefix("model."): tensor for name, tensor in weights.items()},
            self._measured.vocabulary,
            base=self._base,
            fingerprint=self._fingerprint,
            **metadata,
        )
