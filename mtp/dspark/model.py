"""The DSpark draft in plain torch: what vLLM 0.33 executes, for many blocks of a row at once.

A block starts at an anchor p, a token that is known. Its first slot holds that token, the others
the mask token; slot k predicts token p+k+1. All slots read, through keys and values alone, what
the base thought at positions before p. On top, a Markov head adds to each slot's logits a bias that
depends on the token before the predicted one, and a confidence head says how likely the slot is to
be accepted.

Attention follows the engine, not the public trainer, where they differ: a sliding layer's query at
p+k sees `sliding_window` keys, itself included, where the trainer lets every slot see that many
before the anchor. Up to that length both are the same, and so are the logits (tested against
speculators' own class). Source: vLLM 0.33, `qwen3_dflash.py`, `qwen3_dspark.py` and
`v1/worker/gpu/spec_decode/dspark`.

Shapes: R rows, T tokens, A aux layers, N blocks a row, S slots of a block (at most B), H hidden,
D draft vocabulary, V the base's, r Markov rank, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from mtp.dspark.config import SLIDING, DSparkConfig

# Queries that go through attention together, as a share of the row: each also meets the keys of
# the other blocks in its part, in vain.
QUERY_SHARE, LEAST_QUERIES = 8, 64


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32. Not zero-centred, unlike the base's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


@dataclass(frozen=True, kw_only=True)
class BlockPart:
    """Blocks that go through attention together.

    blocks: of the N of each row.
    context: the tokens that any of them sees.
    mask: [R, 1, blocks * S, context + blocks * S] bool, True where a query sees a key.
    """

    blocks: slice
    context: slice
    mask: torch.Tensor


def block_parts(
    anchors: torch.Tensor, num_slots: int, num_tokens: int, window: int | None, device: torch.device
) -> list[BlockPart]:
    """Cut the blocks into parts, with what each may see.

    Args:
        anchors: [R, N] int64 on the CPU, rising in each row.
        num_slots: S.
        num_tokens: T.
        window: keys that a query sees, itself included, and causally in its block; None is all
            before the anchor, and its block both ways.
        device: of the masks.
    """
    size = max(num_tokens // QUERY_SHARE, LEAST_QUERIES) // num_slots or 1
    slots = torch.arange(num_slots, device=device)
    parts = []
    for start in range(0, anchors.shape[1], size):
        here = anchors[:, start : start + size]
        high = int(here.max())
        low = 0 if window is None else max(int(here.min()) - window + 1, 0)
        here = here.to(device)
        columns = torch.arange(low, high, device=device)
        positions = here[:, :, None] + slots  # [R, blocks, S]
        sees = (columns < here[:, :, None, None]).expand(-1, -1, num_slots, -1)
        if window is not None:
            sees = sees & (columns > positions[..., None] - window)
        number = torch.arange(here.shape[1], device=device)
        own = (number[:, None, None, None] == number[:, None]).expand(
            -1, num_slots, -1, num_slots
        )  # [blocks, S, blocks, S]
        if window is not None:
            own = own & (slots[:, None, None] >= slots)
        sees = sees.flatten(1, 2)
        own = own.flatten(2).flatten(0, 1).expand(len(here), -1, -1)
        mask = torch.cat([sees, own], dim=-1).unsqueeze(1)
        parts.append(
            BlockPart(
                blocks=slice(start, start + here.shape[1]), context=slice(low, high), mask=mask
            )
        )
    return parts


# All but cuDNN's, which torch prefers on Hopper: with a mask its backward pass gives gradients that
# are no numbers, at some lengths and scores (since torch 2.11, pytorch#196678).
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(nn.Module):
    """Queries from the blocks; keys and values from the context and from the own block."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.head_dim = size
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)
        self.num_groups = config.num_attention_heads // config.num_key_value_heads

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        context_rotary: torch.Tensor,
        block_rotary: torch.Tensor,
        parts: list[BlockPart],
    ) -> torch.Tensor:
        """[R, N, S, H] and [R, T, H], with angles [T, d] and [R, N, S, d] -> [R, N, S, H]."""
        query = rotated(self.q_norm(self._heads(self.q_proj(x))), block_rotary)
        keys = rotated(self.k_norm(self._heads(self.k_proj(context))), context_rotary)
        own_keys = rotated(self.k_norm(self._heads(self.k_proj(x))), block_rotary)
        values, own_values = self._heads(self.v_proj(context)), self._heads(self.v_proj(x))
        outputs = []
        for part in parts:
            seen = torch.cat([keys[:, part.context], own_keys[:, part.blocks].flatten(1, 2)], dim=1)
            told = torch.cat(
                [values[:, part.context], own_values[:, part.blocks].flatten(1, 2)], dim=1
            )
            asked = query[:, part.blocks].flatten(1, 2).transpose(1, 2)
            with sdpa_kernel(KERNELS):
                output = F.scaled_dot_product_attention(
                    asked.to(told.dtype), self._repeated(seen).to(told.dtype), self._repeated(told),
                    attn_mask=part.mask,
                )  # fmt: skip
            outputs.append(output.transpose(1, 2).flatten(2).unflatten(1, (-1, x.shape[2])))
        return self.o_proj(torch.cat(outputs, dim=1))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))

    def _repeated(self, kept: torch.Tensor) -> torch.Tensor:
        """[R, keys, groups, d] -> [R, heads, keys, d]."""
        return kept.transpose(1, 2).repeat_interleave(self.num_groups, dim=1)


def rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding over whole heads, halves paired. heads [..., n, d], angles [..., d]."""
    angles = angles.unsqueeze(-2)
    first, second = heads.chunk(2, dim=-1)
    return heads * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


class MLP(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        context_rotary: torch.Tensor,
        block_rotary: torch.Tensor,
        parts: list[BlockPart],
    ) -> torch.Tensor:
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, context, context_rotary, block_rotary, parts)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """A bias of the draft's logits by the token before: low rank, r numbers a token."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """How likely a slot is to be accepted, as a logit, from [hidden, Markov embedding]."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)


class DSparkModel(nn.Module):
    """Backbone, output matrix, Markov and confidence head; parameters named as they are saved.

    The base's embedding is not part of it: callers look tokens up in the base.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.aux_layers) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in config.layer_types)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)
        self.activation_checkpointing = False  # recompute layers in the backward pass

    def initialize(self, output_rows: torch.Tensor, final_norm: torch.Tensor) -> None:
        """The start of training: the base's output rows and norm, all else small and random.

        Args:
            output_rows: [D, H], rows of the base's lm_head.
            final_norm: [H], what the base's final norm multiplies with.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.markov_head.markov_w1.weight, std=0.01)
        with torch.no_grad():
            self.lm_head.weight.copy_(output_rows)
            self.norm.weight.copy_(final_norm)

    def forward(
        self, aux: torch.Tensor, embeddings: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """The backbone.

        Args:
            aux: [R, T, A * H] outputs of the aux layers, concatenated in their order.
            embeddings: [R, N, S, H] of the anchor tokens and of the mask token.
            anchors: [R, N] int64 on the CPU, rising in each row.

        Returns:
            [R, N, S, H], what `lm_head` reads.
        """
        num_slots, num_tokens = embeddings.shape[2], aux.shape[1]
        device = aux.device
        context = self.hidden_norm(self.fc(aux))
        slots = torch.arange(num_slots, device=device)
        block_rotary = self._angles(anchors.to(device)[..., None] + slots)
        context_rotary = self._angles(torch.arange(num_tokens, device=device))
        parts: dict[str, list[BlockPart]] = {}
        x = embeddings
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            if kind not in parts:
                window = self.config.sliding_window if kind == SLIDING else None
                parts[kind] = block_parts(anchors, num_slots, num_tokens, window, device)
            inputs = (x, context, context_rotary, block_rotary, parts[kind])
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*inputs)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """[..., H] and the ids [...] of the tokens before the predicted ones -> [..., D]."""
        embedded = self.markov_head.markov_w1(previous)
        return self.lm_head(hidden) + self.markov_head.markov_w2(embedded)

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """[..., H] and the ids [...] of the tokens before -> [...] logits of acceptance."""
        embedded = self.markov_head.markov_w1(previous)
        return self.confidence_head.proj(torch.cat([hidden, embedded], dim=-1)).squeeze(-1)

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotary angles [..., d] of positions [...]."""
        size = self.config.head_dim
        exponents = torch.arange(0, size, 2, device=positions.device).float() / size
        frequencies = float(self.config.rope_parameters["rope_theta"]) ** -exponents
        angles = positions[..., None].float() * frequencies
        return torch.cat([angles, angles], dim=-1)
