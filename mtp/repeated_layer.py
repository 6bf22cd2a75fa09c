"""Attention of one layer that runs several steps, as a stock vLLM runs it, for all starts at once.

Step 0 is causal over the window. Step k >= 1 of a start p attends to step 0's keys up to p and to
this start's own keys of steps 1..k. As one attention over K+1 windows of keys that needs a mask of
[W, (k+1) W] with W (W+1) / 2 + k W entries in use: 4 GiB at 32k tokens and k = 3, and no fast
kernel takes it. Here the causal part goes through the flash kernel, the k own keys of each
start are dot products, and the two are joined by their log-sum-exp, which is exact.

The gradient needs no more: flash attention's backward recomputes probabilities as
exp(score - log-sum-exp) and subtracts sum(gradient * output), so given the *joined* output and
log-sum-exp it returns the gradient of the joined attention (the same fact that ring attention
rests on, Liu et al. 2023, arXiv 2310.01889). PyTorch has no public call that takes them, hence the
`aten` operators; which one depends on device and type.

Shapes: B rows, A query heads, G key heads, W starts, D head size, S = k own keys a start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "mtp_graft_chain"  # name in transformers' table of attention functions


class RepeatedLayerCache:
    """Keys and values of one layer that runs several steps over shrinking windows of starts."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def at(self, step: int) -> StepCache:
        """What the layer is given as its cache at a step."""
        return StepCache(self, step)


class StepCache:
    """One step's view; stands in for transformers' cache, of which a layer uses `update` alone.

    It knows its step, so that a layer that is run again (activation checkpointing) finds what it
    found the first time.
    """

    def __init__(self, cache: RepeatedLayerCache, step: int) -> None:
        self.cache, self.step = cache, step

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep this step's [B, G, W, D]; return step 0's of the same starts."""
        self.cache.keys[self.step], self.cache.values[self.step] = keys, values
        window = keys.shape[2]
        return self.cache.keys[0][:, :, :window], self.cache.values[0][:, :, :window]

    def own(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of steps 1..k: [B, G, S, W, D] each."""
        steps = range(1, self.step + 1)
        return (
            torch.stack([self.cache.keys[step][:, :, :window] for step in steps], dim=2),
            torch.stack([self.cache.values[step][:, :, :window] for step in steps], dim=2),
        )


def chain_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    chain: StepCache | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: its own "sdpa", but for the later steps of a chain.

    Args:
        module: the attention layer.
        query: [B, A, W, D].
        key, value: [B, G, W, D]; of step 0 in a chain.
        attention_mask: None is causal.
        scaling: of the scores.
        chain: the cache of a repeated layer.
        keywords: what else "sdpa" takes.

    Returns:
        [B, W, A, D], and no probabilities.
    """
    if chain is None or chain.step == 0:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output, _ = plain(module, query, key, value, attention_mask, scaling=scaling, **keywords)
        return output, None
    tensors = [t.to(value.dtype) for t in (query, key, value, *chain.own(query.shape[2]))]
    output = _JoinedAttention.apply(*tensors, scaling)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, chain_attention)


class _JoinedAttention(torch.autograd.Function):
    """Causal attention to step 0, joined with each start's own keys: [B, A, W, D]."""

    @staticmethod
    def forward(ctx, query, key, value, own_key, own_value, scale):  # type: ignore[no-untyped-def]
        groups = query.shape[1] // key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        every_key, every_value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        causal, log_sum, kernel_state = _causal_forward(query, every_key, every_value, scale)
        grouped = query.unflatten(1, (-1, groups)).to(wide)
        scores = scale * torch.einsum("bgnwd,bgswd->bgnsw", grouped, own_key.to(wide))
        own_log_sum = scores.logsumexp(3).flatten(1, 2)
        joined = torch.logaddexp(log_sum, own_log_sum)
        output = causal.to(wide) * (log_sum - joined).exp().unsqueeze(-1)
        shares = (scores - joined.unflatten(1, (-1, groups)).unsqueeze(3)).exp()
        own = torch.einsum("bgnsw,bgswd->bgnwd", shares, own_value.to(wide))
        output = (output + own.flatten(1, 2)).to(query.dtype)
        ctx.save_for_backward(query, key, value, own_key, own_value, output, joined, shares)
        ctx.scale, ctx.groups, ctx.kernel_state = scale, groups, kernel_state
        return output

    @staticmethod
    def backward(ctx, by_output):  # type: ignore[no-untyped-def]
        query, key, value, own_key, own_value, output, joined, shares = ctx.saved_tensors
        wide = joined.dtype
        every_key, every_value = (t.repeat_interleave(ctx.groups, dim=1) for t in (key, value))
        by_query, by_key, by_value = _causal_backward(
            by_output, query, every_key, every_value, output, joined, ctx.scale, ctx.kernel_state
        )
        by_key, by_value = (t.unflatten(1, (-1, ctx.groups)).sum(2) for t in (by_key, by_value))
        by, out, queries = (
            t.unflatten(1, (-1, ctx.groups)).to(wide) for t in (by_output, output, query)
        )
        by_shares = torch.einsum("bgnwd,bgswd->bgnsw", by, own_value.to(wide))
        mean = (by * out).sum(-1).unsqueeze(3)
        by_scores = ctx.scale * shares * (by_shares - mean)
        own_by_query = torch.einsum("bgnsw,bgswd->bgnwd", by_scores, own_key.to(wide))
        by_query = by_query + own_by_query.flatten(1, 2).to(by_query.dtype)
        by_own_key = torch.einsum("bgnsw,bgnwd->bgswd", by_scores, queries).to(own_key.dtype)
        by_own_value = torch.einsum("bgnsw,bgnwd->bgswd", shares, by).to(own_value.dtype)
        return by_query, by_key, by_value, by_own_key, by_own_value, None


def _causal_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Causal attention [B, A, W, D], log-sum-exp [B, A, W], and what its backward wants back."""
    aten = torch.ops.aten
    if not query.is_cuda:
        output, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scale
        )
        return output, log_sum, ()
    if query.dtype == torch.float32:  # flash takes half types only
        output, log_sum, *state = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, True, scale=scale
        )
        return output, log_sum[..., : query.shape[2]], (log_sum.shape[-1], *state)
    output, log_sum, *state, _ = aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, True, False, scale=scale
    )
    return output, log_sum, tuple(state)


def _causal_backward(
    by_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    scale: float,
    state: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by query, key and value of the part that `_causal_forward` computed."""
    aten = torch.ops.aten
    if not query.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            by_output, query, key, value, output, log_sum, 0.0, True, scale=scale
        )
    if query.dtype == torch.float32:
        padded, *state_ = state
        log_sum = nn.functional.pad(log_sum, (0, padded - log_sum.shape[-1]))
        return aten._scaled_dot_product_efficient_attention_backward(  # type: ignore[no-any-return]
            by_output, query, key, value, None, output, log_sum, *state_, 0.0,
            [True, True, True, False], True, scale=scale,
        )[:3]  # fmt: skip
    rows, keys, max_row, max_key, *philox = state
    return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        by_output, query, key, value, output, log_sum, rows, keys, max_row, max_key, 0.0, True,
        *philox, scale=scale,
    )  # fmt: skip
