"""`token_terms` on a GPU: each logit is read two or three times, and only gradients are written.

In plain PyTorch the terms of a token take some ten passes over [K, N, V] float32 matrices, which at
a vocabulary of 248,320 cost more time than the matrix products around them. Here one program
handles a row: a first loop finds its log-sum-exp, its most probable token and its KL, a second, for
TV only, how much probability lies above the base's, and the last writes the gradients, in the type
that the product with `lm_head` wants. Rows are too long to stay in a multiprocessor, so every loop
reads them again from memory.

Numerics are those of `token_terms`: float32 throughout, no rounding of logits. Needs Triton, which
PyTorch's CUDA builds bring; `mtp.losses.fused` uses the plain form where it is missing.

Shapes: K steps, N targets of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp.losses.terms import Objective

BLOCK = 2048  # logits of a row that a program holds at a time
NUM_WARPS = 8


def token_terms(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    objective: Objective,
    gradient_dtype: torch.dtype,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """What `mtp.losses.terms.token_terms` returns, gradients in `gradient_dtype`.

    Args:
        logits: [K, N, V] float32, contiguous.
        teacher_logits: [N, V] float32, contiguous.
        targets: [N], indices into V.
        objective: which terms.
        gradient_dtype: float32, or the type of `lm_head`.
    """
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        return _token_terms(logits, teacher_logits, targets, objective, gradient_dtype)


def _token_terms(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    objective: Objective,
    gradient_dtype: torch.dtype,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    num_steps, num_targets, vocabulary = logits.shape
    deferred = objective.deferred
    shape, device = (num_steps, num_targets), logits.device
    scale = 1.0 / objective.temperature
    teacher_log_sums, teacher_top = log_sums(teacher_logits, scale)
    divergences = {name: torch.zeros(shape, device=device) for name in ("ce", "kl", "tv")}
    top = torch.empty(shape, dtype=torch.int32, device=device)
    names = [*(["immediate"] if objective.immediate else []), *deferred]
    gradients = {name: torch.empty_like(logits, dtype=gradient_dtype) for name in names}
    unused = logits  # stands where no gradient is written
    # Steps first: programs that run side by side then share a teacher row in the cache.
    _row_terms[(num_steps, num_targets)](
        logits, teacher_logits, teacher_log_sums, targets, scale,
        objective.ce, objective.kl, objective.tv,
        *divergences.values(), top,
        *(gradients.get(name, unused) for name in ("immediate", "kl", "tv")),
        NEEDS_KL=bool(objective.kl or "kl" in deferred),
        NEEDS_TV=bool(objective.tv or "tv" in deferred),
        WRITE_IMMEDIATE=objective.immediate, WRITE_KL="kl" in deferred, WRITE_TV="tv" in deferred,
        VOCABULARY=vocabulary, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip

    values = {name: divergences[name] for name in deferred}
    if objective.immediate:
        values["immediate"] = sum(
            getattr(objective, name) * value
            for name, value in divergences.items()
            if getattr(objective, name)
        )
    return values, gradients, top == teacher_top


def log_sums(logits: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, V] float32 -> log-sum-exp of logits * scale, [N], and most probable token, [N] int32."""
    found = torch.empty(len(logits), device=logits.device)
    top = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    _row_statistics[(len(logits),)](
        logits, scale, found, top,
        VOCABULARY=logits.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return found, top


@triton.jit
def _accumulate(x, columns, largest, total, where):
    """One block into running maximum, sum of exp(x - maximum) and column of the maximum, a lane.

    Of exp(x - maximum) and exp(old maximum - maximum) one is 1, so one exponential does.
    """
    distance = x - largest
    decay = tl.exp(-tl.abs(distance))
    is_larger = distance > 0
    total = tl.where(is_larger, total * decay + 1.0, total + decay)
    where = tl.where(is_larger, columns, where)
    return tl.maximum(largest, x), total, where


@triton.jit
def _reduce(largest, total, where):
    """Lanes to one log-sum-exp and the first column of the maximum."""
    maximum = tl.max(largest, axis=0)
    log_sum = maximum + tl.log(tl.sum(total * tl.exp(largest - maximum), axis=0))
    return log_sum, tl.min(tl.where(largest == maximum, where, 2147483647), axis=0)


@triton.jit
def _row_statistics(
    logits, scale, found, tops, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * VOCABULARY
    lanes = tl.arange(0, BLOCK)
    # Finite, so that no difference is infinity minus infinity; below any logit.
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for first in range(0, VOCABULARY, BLOCK):
        columns = first + lanes
        x = tl.load(start + columns, mask=columns < VOCABULARY, other=-1e37)
        largest, total, where = _accumulate(x * scale, columns, largest, total, where)
    log_sum, top = _reduce(largest, total, where)
    tl.store(found + row, log_sum)
    tl.store(tops + row, top)


@triton.jit
def _row_terms(
    logits, teacher_logits, teacher_log_sums, targets, scale,
    weight_ce, weight_kl, weight_tv,
    ces, kls, tvs, tops, by_immediate, by_kl, by_tv,
    NEEDS_KL: tl.constexpr, NEEDS_TV: tl.constexpr,
    WRITE_IMMEDIATE: tl.constexpr, WRITE_KL: tl.constexpr, WRITE_TV: tl.constexpr,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    step, target = tl.program_id(0), tl.program_id(1)
    row = step * tl.num_programs(1) + target
    offset = row.to(tl.int64) * VOCABULARY
    start = logits + offset
    teacher = teacher_logits + target.to(tl.int64) * VOCABULARY
    teacher_log_sum = tl.load(teacher_log_sums + target)
    label = tl.load(targets + target)
    lanes = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    cross = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        columns = first + lanes
        inside = columns < VOCABULARY
        x = tl.load(start + columns, mask=inside, other=-1e37) * scale
        largest, total, where = _accumulate(x, columns, largest, total, where)
        if NEEDS_KL:
            t = tl.load(teacher + columns, mask=inside, other=-1e37) * scale
            p = tl.exp(t - teacher_log_sum)
            cross += tl.where(inside, p * (t - x), 0.0)
    log_sum, top = _reduce(largest, total, where)
    tl.store(tops + row, top)
    tl.store(ces + row, log_sum - tl.load(start + label) * scale)
    if NEEDS_KL:  # sum_v p ((t - teacher's log-sum) - (x - log-sum)), with sum_v p = 1
        tl.store(kls + row, tl.sum(cross, axis=0) - teacher_log_sum + log_sum)

    above = 0.0  # probability of the tokens that the head favours more than the base does
    if NEEDS_TV:
        lanes_above = tl.zeros([BLOCK], tl.float32)
        excess = tl.zeros([BLOCK], tl.float32)
        for first in range(0, VOCABULARY, BLOCK):
            columns = first + lanes
            inside = columns < VOCABULARY
            x = tl.load(start + columns, mask=inside, other=-1e37) * scale
            t = tl.load(teacher + columns, mask=inside, other=-1e37) * scale
            q, p = tl.exp(x - log_sum), tl.exp(t - teacher_log_sum)
            lanes_above += tl.where(q > p, q, 0.0)
            excess += tl.where(q > p, q - p, 0.0)
        above = tl.sum(lanes_above, axis=0)
        tl.store(tvs + row, tl.sum(excess, axis=0))

    for first in range(0, VOCABULARY, BLOCK):
        columns = first + lanes
        inside = columns < VOCABULARY
        x = tl.load(start + columns, mask=inside, other=-1e37) * scale
        q = tl.exp(x - log_sum)
        p, tv = q, q
        if NEEDS_KL or NEEDS_TV:
            t = tl.load(teacher + columns, mask=inside, other=-1e37) * scale
            p = tl.exp(t - teacher_log_sum)
            tv = q * (tl.where(q > p, 1.0, 0.0) - above)
        if WRITE_IMMEDIATE:
            gradient = weight_ce * (q - tl.where(columns == label, 1.0, 0.0))
            if NEEDS_KL:
                gradient += weight_kl * (q - p)
            if NEEDS_TV:
                gradient += weight_tv * tv
            tl.store(by_immediate + offset + columns, gradient, mask=inside)
        if WRITE_KL:
            tl.store(by_kl + offset + columns, q - p, mask=inside)
        if WRITE_TV:
            tl.store(by_tv + offset + columns, tv, mask=inside)
