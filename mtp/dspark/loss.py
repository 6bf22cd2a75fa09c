"""What each slot should say, and how far it is from that; over chunks of slots.

The target is the base's distribution at p+k, over its whole vocabulary. What lies outside the
draft's vocabulary cannot be drafted and counts as missed: total variation and acceptance are those
that the engine has, where the public trainer renormalises the base to what the draft can say and so
overstates both. A slot whose most probable token cannot be drafted has no cross-entropy.

Terms of a slot, p the base's distribution, q the draft's:
    ce          -log q(argmax p), if the draft has that token, else 0
    tv          1 - overlap, overlap = sum of min(p, q): the chance to be accepted by sampling
    confidence  binary cross-entropy of the confidence head against the overlap, not differentiated

[n, D] matrices live for one chunk: they are computed again in the backward pass.

Shapes: N slots, U positions of the base, H hidden, D draft vocabulary, V the base's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mtp.dspark.model import DSparkModel

# Floats of one [slots, D] matrix: what the caches of a CPU hold, what fills a GPU.
CHUNK_FLOATS = {"cpu": 2**20, "cuda": 2**27}


@dataclass(frozen=True, kw_only=True)
class BaseTargets:
    """What the base says at U positions.

    hidden: [U, H] after the final norm.
    log_sum: [U] float32, over the whole vocabulary.
    top: [U] int64, its most probable token.
    """

    hidden: torch.Tensor
    log_sum: torch.Tensor
    top: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class SlotTerms:
    """[N] float32 each. The first three are differentiable.

    agrees: 1 where the draft's most probable token is the base's.
    sure: the confidence head's probability.
    missed: the base's probability of tokens outside the draft's vocabulary.
    """

    ce: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    agrees: torch.Tensor
    sure: torch.Tensor
    missed: torch.Tensor


def chunk_length(num_columns: int, device: torch.device) -> int:
    """Rows of a chunk, for matrices of so many columns."""
    return max(CHUNK_FLOATS.get(device.type, CHUNK_FLOATS["cuda"]) // num_columns, 16)


@torch.no_grad()
def base_targets(hidden: torch.Tensor, lm_head: torch.Tensor) -> BaseTargets:
    """What the base says at positions with states [U, H] after the final norm; lm_head [V, H]."""
    log_sums, tops = [], []
    for part in hidden.split(chunk_length(lm_head.shape[0], hidden.device)):
        logits = F.linear(part, lm_head).float()
        log_sums.append(logits.logsumexp(-1))
        tops.append(logits.argmax(-1))
    return BaseTargets(hidden=hidden, log_sum=torch.cat(log_sums), top=torch.cat(tops))


def slot_terms(
    model: DSparkModel,
    hidden: torch.Tensor,
    previous: torch.Tensor,
    targets: BaseTargets,
    positions: torch.Tensor,
    kept_rows: torch.Tensor,
    draft_ids: torch.Tensor,
    *,
    chunk_size: int | None = None,
) -> SlotTerms:
    """Every slot against the base.

    Args:
        model: output matrix, Markov and confidence head.
        hidden: [N, H] of the backbone, N > 0.
        previous: [N] ids of the tokens before the predicted ones.
        targets: the base at U positions.
        positions: [N] which of those each slot is to match.
        kept_rows: [D, H] rows of the base's lm_head that the draft has.
        draft_ids: [V] the draft's id of each of the base's tokens, or -1.
        chunk_size: slots a chunk.
    """
    size = chunk_size or chunk_length(kept_rows.shape[0], hidden.device)
    parts = [
        checkpoint(
            _chunk_terms, model, hidden[start : start + size], previous[start : start + size],
            targets, positions[start : start + size], kept_rows, draft_ids,
            use_reentrant=False, preserve_rng_state=False,
        )
        for start in range(0, len(hidden), size)
    ]  # fmt: skip
    return SlotTerms(
        **{
            field.name: torch.cat([getattr(part, field.name) for part in parts])
            for field in fields(SlotTerms)
        }
    )


def _chunk_terms(
    model: DSparkModel,
    hidden: torch.Tensor,
    previous: torch.Tensor,
    targets: BaseTargets,
    positions: torch.Tensor,
    kept_rows: torch.Tensor,
    draft_ids: torch.Tensor,
) -> SlotTerms:
    with torch.no_grad():
        unique, inverse = positions.unique(return_inverse=True)  # neighbouring blocks share them
        base = F.linear(targets.hidden[unique], kept_rows).float()
        base = (base - targets.log_sum[unique, None]).exp()[inverse]  # [n, D] of the whole's mass
        wanted = draft_ids[targets.top[positions]]
    log_chances = model.logits(hidden, previous).float().log_softmax(-1)
    overlap = torch.minimum(log_chances.exp(), base).sum(-1)
    ce = -log_chances.gather(-1, wanted.clamp(min=0)[:, None])[:, 0] * (wanted >= 0)
    sure = model.confidence(hidden, previous).float()
    return SlotTerms(
        ce=ce,
        tv=1 - overlap,
        confidence=F.binary_cross_entropy_with_logits(
            sure, overlap.detach().clamp(0, 1), reduction="none"
        ),
        agrees=(log_chances.argmax(-1) == wanted).float(),
        sure=sure.detach().sigmoid(),
        missed=(1 - base.sum(-1)).clamp(min=0),  # which rounding leaves below zero
    )
