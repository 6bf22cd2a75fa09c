"""The shape of a DSpark draft.

It takes its width, heads and rotary base from the base that it drafts for; its depth, block and
vocabulary from the recipe. Source: speculators 0.9.0, `train/cli.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.errors import UserError
from mtp.dspark.recipe import DSparkRecipe

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """V `vocab_size`, D `draft_vocab_size`, H `hidden_size`, B `block_size`, r `markov_rank`.

    Attributes:
        aux_layers: numbers of finished base layers whose output is read, rising; the base's last
            layer has its number of layers, and its output is taken before the final norm.
        layer_types: full layers see their block both ways, sliding ones causally. The reference
            has sliding ones only.
        sliding_window: keys that a query sees, itself included.
        rope_parameters: the whole head rotates, whatever the base does (see `draft_rope`).
        mask_token_id: whose embedding the slots after the first one hold.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    initializer_range: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    layer_types: tuple[str, ...]
    sliding_window: int
    block_size: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    markov_rank: int

    @property
    def has_draft_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size


def config_for_base(
    text_config: Mapping[str, Any], recipe: DSparkRecipe, mask_token_id: int
) -> DSparkConfig:
    """The draft that a recipe describes, for a base.

    Args:
        text_config: the base's, from its config.json.
        recipe: depth, block, vocabulary.
        mask_token_id: from `choose_mask_token`.

    Raises:
        UserError: layers that the base does not have, a rotary embedding that the draft cannot
            take over, or a window smaller than a block.
    """
    hidden, vocabulary = int(text_config["hidden_size"]), int(text_config["vocab_size"])
    heads, groups = text_config["num_attention_heads"], text_config["num_key_value_heads"]
    head_dim = text_config.get("head_dim") or hidden // heads
    if hidden % heads and not hidden % head_dim:
        heads = hidden // head_dim
        groups = groups if heads % groups == 0 else heads
    layers = recipe.num_layers
    if any(layer >= layers for layer in recipe.full_attention_layers):
        raise UserError(
            f"full_attention_layers below {layers}",
            ", ".join(map(str, recipe.full_attention_layers)),
            "correct the recipe",
        )
    if recipe.sliding_window < recipe.block_size:
        raise UserError(
            f"a sliding_window of at least block_size, {recipe.block_size}",
            str(recipe.sliding_window),
            "correct the recipe",
        )
    return DSparkConfig(
        vocab_size=vocabulary,
        draft_vocab_size=min(recipe.draft_vocab_size, vocabulary),
        hidden_size=hidden,
        intermediate_size=int(text_config.get("intermediate_size") or 3 * hidden),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=float(text_config.get("rms_norm_eps", 1e-6)),
        initializer_range=float(text_config.get("initializer_range", 0.02)),
        max_position_embeddings=int(text_config["max_position_embeddings"]),
        rope_parameters=draft_rope(text_config, head_dim),
        layer_types=tuple(
            FULL if layer in recipe.full_attention_layers else SLIDING for layer in range(layers)
        ),
        sliding_window=recipe.sliding_window,
        block_size=recipe.block_size,
        aux_layers=recipe.layers_read(int(text_config["num_hidden_layers"])),
        mask_token_id=mask_token_id,
        markov_rank=recipe.markov_rank,
    )


def draft_rope(text_config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The base's rotary base, over the whole head.

    The public trainer's layers rotate whole heads, so a partial factor in the file would make vLLM
    rotate less than was trained: acceptance was 1.05 of 15 at a validation accuracy of .87
    (speculators#613). Sections for images are scaled with the factor, as there.

    Raises:
        UserError: a scaled kind of rotary embedding, or sections that do not fill the head.
    """
    rope = dict(text_config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise UserError(
            "a base with rope_type default", f"{kind!r}", "a DSpark draft cannot follow that one"
        )
    theta = rope.get("rope_theta", text_config.get("rope_theta", 10000.0))
    result = {"rope_type": "default", "rope_theta": float(theta)}
    if "mrope_section" in rope:
        scale = round(1 / float(rope.get("partial_rotary_factor", 1.0)))
        sections = [int(size) * scale for size in rope["mrope_section"]]
        if 2 * sum(sections) != head_dim:
            raise UserError(
                f"mrope_section that fills a head of {head_dim}",
                f"{sections} once scaled by {scale}",
                "correct the base's config.json",
            )
        result |= {"mrope_section": sections, "partial_rotary_factor": 1.0}
    return result


def choose_mask_token(base: Path, text_config: Mapping[str, Any], wanted: int = 0) -> int:
    """The token of the masked slots: `wanted`, else the first embedding that no token has, else
    padding, else the end of a turn.

    Raises:
        UserError: none of these, or one outside the vocabulary.
    """
    vocabulary = int(text_config["vocab_size"])
    candidates = [wanted or None, _num_tokens(base)]
    candidates += [text_config.get("pad_token_id"), text_config.get("eos_token_id")]
    for candidate in candidates:
        if isinstance(candidate, int) and 0 < candidate < vocabulary:
            return candidate
        if candidate and candidate == wanted:
            break
    raise UserError(
        f"a mask token below {vocabulary}",
        str(wanted or "none that the base's files name"),
        "set dspark.mask_token_id in the recipe",
    )


def _num_tokens(base: Path) -> int | None:
    """One more than the largest token id of the base's tokenizer."""
    try:
        tokenizer = json.loads((base / "tokenizer.json").read_text())
        ids = list(tokenizer["model"]["vocab"].values())
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
        return int(max(ids)) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
