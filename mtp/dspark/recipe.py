"""[dspark] of a recipe. `mtp.recipe` reads it with the rest."""

from __future__ import annotations

from dataclasses import dataclass

from graft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DSparkRecipe:
    """The other draft (`mtp train --draft dspark`); defaults are those of the reference.

    They go with rows of 4096 tokens and a learning rate of 3e-4, which `train.draft` brings.

    num_layers: of the draft.
    block_size: tokens that one pass drafts.
    num_speculative_tokens: of them, how many are served and measured.
    draft_vocab_size: the most frequent supervised tokens; at most the base's vocabulary.
    aux_layers: base layers whose output is read, by the number of layers finished; none takes 9, 19
        and 29 of 40, scaled to the base's depth.
    full_attention_layers: draft layers (from 0) that see all that is before, the others a window.
    sliding_window: keys that a query of those sees.
    mask_token_id: 0 takes an embedding that no token uses, or padding.
    markov_rank: of the bias by the token before.
    max_anchors: blocks of one row and step, drawn anew each step; 0 takes all.
    ce, tv: weights of the cross-entropy and of the total variation distance.
    confidence: weight of the confidence head's loss.
    decay: slot k, from 0, weighs exp(-k / decay).
    train_lm_head: whether the output matrix learns too, or stays the base's. With the base's whole
        vocabulary, speculators (not vLLM) loads the base's in its place.
    eval_rows: held-out rows for the reference's teacher-forced table.
    """

    num_layers: int = 3
    block_size: int = 8
    num_speculative_tokens: int = 7
    draft_vocab_size: int = 32000
    aux_layers: tuple[int, ...] = ()
    full_attention_layers: tuple[int, ...] = ()
    sliding_window: int = 2048
    mask_token_id: int = 0
    markov_rank: int = 256
    max_anchors: int = 3072
    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    train_lm_head: bool = False
    eval_rows: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= self.block_size:
            raise UserError(
                f"dspark.num_speculative_tokens of 1 to block_size, {self.block_size}",
                str(self.num_speculative_tokens),
                "correct the recipe",
            )
        if not any((self.ce, self.tv, self.confidence)):
            raise UserError(
                "a loss with a term above 0 (dspark.ce, tv, confidence)",
                "none",
                "correct the recipe",
            )

    def layers_read(self, depth: int) -> tuple[int, ...]:
        """The aux layers, of a base of so many layers.

        Raises:
            UserError: not rising, or not in 1..depth. (vLLM hands them over in rising order.)
        """
        if not self.aux_layers:
            return tuple(sorted({max(round(layer * depth / 40), 1) for layer in (9, 19, 29)}))
        wanted = self.aux_layers
        if list(wanted) != sorted(set(wanted)) or wanted[0] < 1 or wanted[-1] > depth:
            raise UserError(
                f"dspark.aux_layers that rise within 1..{depth}, the base's layers",
                ", ".join(map(str, wanted)),
                "correct the recipe",
            )
        return wanted
