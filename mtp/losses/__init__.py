"""Distillation losses: hidden states in, loss and gradient out.

`align` gathers what predicts each supervised token, `terms` holds the divergences of a token and
their gradients, `combine` what couples tokens or steps (LK, end-to-end TV, weights), `fused` the
loop over chunks, and `objective` reads a recipe and takes a batch through all of it.

Everything is aligned on the *target*: the K steps that predict token t share one row of teacher
logits. End-to-end TV couples the K steps of one *start*, whose targets are K different tokens, and
LK's mix depends on a mean over the batch; still neither needs another alignment or a second pass.
Both see a token's distributions through one number each (its TV, its KL), so the one pass keeps the
gradient of those numbers by the hidden state, [K, N, H], and scales it at the end by the factors
that the [K, N] numbers give. With u = 2 N H V operations, a step of K layers then costs K u for
its logits, u for the teacher's and K u for each divergence whose gradient is kept apart: 9 u for
KL, TV or end-to-end TV at K = 4, 13 u for LK. The alternatives: two passes (first the numbers, then
the gradient) cost 14 u; alignment on starts repeats the teacher for K-1 targets a chunk and still
needs every chain whole before its gradient is known. At the vocabulary of 248,320 and 8192 targets
of hidden size 2048, u is 8.3 TFLOP. The price is one more [K, N, H] tensor for LK.
"""

from mtp.losses.align import AlignedTargets, align
from mtp.losses.fused import FusedLoss, chunked_loss
from mtp.losses.objective import (
    category_weights,
    objective_at,
    position_weights,
    require_categories,
    stage_begin,
)
from mtp.losses.terms import Objective

__all__ = [
    "AlignedTargets",
    "FusedLoss",
    "Objective",
    "align",
    "category_weights",
    "chunked_loss",
    "objective_at",
    "position_weights",
    "require_categories",
    "stage_begin",
]
