"""Routed experts as grouped matrix products, in the arithmetic that autocast asks for.

transformers' own "grouped_mm" is not seen by autocast: with float32 weights it multiplies in
float32, which on a GPU means no grouped kernel at all, but a loop over the experts (torch's
`_grouped_mm_cuda` is for bfloat16 only). Training keeps float32 weights, so here they are cast
first. The copy is not kept for the backward pass, which casts again: for a head of the 35B's size
that is 6 GB less for one more pass over the weights.

Moving tokens to their experts and back is written out, because autograd's gradient of an indexed
read sorts the indices again and adds one row after the other. Each move is a permutation, so the
gradient of the one is the other. The router's weight goes in before the down projection, which is
linear: there a row is a quarter as wide as after it.

Shapes: T tokens, k experts a token, S = T k, E experts, H hidden size, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS = "mtp_graft_grouped"  # name in transformers' table of experts functions


def grouped_experts(
    module: nn.Module,
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
) -> torch.Tensor:
    """transformers' experts function: what "eager" computes, one product for all experts.

    Args:
        module: transformers' experts, with `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I].
        hidden: [T, H].
        expert_ids: [T, k], none twice in a row.
        expert_weights: [T, k].

    Returns:
        [T, H], of the type of `hidden`.
    """
    dtype = _arithmetic(hidden)
    flat = expert_ids.flatten()
    sorted_ids, order = flat.sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    experts = torch.arange(module.num_experts, device=flat.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True).int()

    rows = _ToExperts.apply(hidden.to(dtype), order, places)  # type: ignore[no-untyped-call]
    gate_up = _GroupedLinear.apply(rows, module.gate_up_proj, ends)  # type: ignore[no-untyped-call]
    weights = expert_weights.to(dtype).flatten().index_select(0, order)
    inner = module._apply_gate(gate_up) * weights.unsqueeze(-1)
    rows = _GroupedLinear.apply(inner, module.down_proj, ends)  # type: ignore[no-untyped-call]
    found = _FromExperts.apply(rows, order, places, len(hidden))  # type: ignore[no-untyped-call]
    return found.to(hidden.dtype)  # type: ignore[no-any-return]


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, grouped_experts)


def _arithmetic(tensor: torch.Tensor) -> torch.dtype:
    """The type that a matrix product of this tensor would be computed in."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _spread(tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[T, H] -> [S, H], sorted by expert."""
    return tokens.index_select(0, order // (len(order) // len(tokens)))


def _collect(rows: torch.Tensor, places: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[S, H], sorted by expert -> [T, H], the sum of each token's rows."""
    return rows.index_select(0, places).unflatten(0, (num_tokens, -1)).sum(1)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, order, places):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(places)
        ctx.num_tokens = len(tokens)
        return _spread(tokens, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_rows):  # type: ignore[no-untyped-def]
        (places,) = ctx.saved_tensors
        return _collect(by_rows, places, ctx.num_tokens), None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, places, num_tokens):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(order)
        return _collect(rows, places, num_tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_tokens):  # type: ignore[no-untyped-def]
        (order,) = ctx.saved_tensors
        return _spread(by_tokens, order), None, None, None


class _GroupedLinear(torch.autograd.Function):
    """[S, in] rows times the transposed weight, [E, out, in], of their expert: [S, out]."""

    @staticmethod
    def forward(ctx, rows, weight, ends):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, weight, ends)
        return F.grouped_mm(rows, weight.to(rows.dtype).mT, offs=ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_output):  # type: ignore[no-untyped-def]
        rows, weight, ends = ctx.saved_tensors
        by_rows = by_weight = None
        if ctx.needs_input_grad[0]:
            by_rows = F.grouped_mm(by_output, weight.to(rows.dtype), offs=ends)
        if ctx.needs_input_grad[1]:
            by_weight = F.grouped_mm(by_output.mT, rows, offs=ends).to(weight.dtype)
        return by_rows, by_weight, None
