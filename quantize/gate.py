"""The gate: is the quantized head accepted as often as the BF16 one was?

Both are replayed on the same continuations of the base, so a difference is theirs and not the
text's. The interval is a paired bootstrap over prompts: rounds of one prompt hang together, and
whole prompts are what another sample would draw. A head fails when even the favourable end of the
interval is a larger drop than allowed: a noisy measurement fails nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from graft.errors import UserError
from graft.manifest import HeadFolder
from mtp.acceptance import AcceptanceCounts, Continuations, Runtime, summarise
from mtp.teacher.source import HiddenSource
from quantize.layerwise import load_layer, visits

NUM_RESAMPLES, SEED, CONFIDENCE = 2000, 0, 0.95
CHUNK = 512  # positions whose logits are held at once
MIN_PROMPTS = 2
"""One prompt resampled is always itself: an interval without width, which would prove any drop."""


class GateFailed(UserError):
    """Quantization cost more acceptance than allowed; `result` is the command's report."""

    def __init__(self, *message: str, result: dict[str, Any]) -> None:
        super().__init__(*message)
        self.result = result


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A head's acceptance on some continuations, prompt by prompt."""

    counts: list[AcceptanceCounts]
    metrics: dict[str, Any]


@torch.no_grad()
def replay_head(
    teacher: HiddenSource, source: HeadFolder, text: Continuations, num_steps: int, runtime: Runtime
) -> Replay:
    """What `mtp.acceptance.measure` counts, with one layer of the head in memory at a time.

    Args:
        teacher: the base's embedding and `lm_head`.
        source: a head of any form; NVFP4 experts are dequantized and their inputs left alone, as
            vLLM computes where it has no FP4 arithmetic.
        text: prompts and the base's continuations.
        num_steps: tokens drafted a round.
        runtime: routed or stock.
    """
    rows = [torch.tensor([row], device=teacher.device) for row in text.rows()]
    drafts: list[list[list[int]]] = [[] for _ in rows]
    lm_head = teacher.lm_head.float()
    states = [state.unsqueeze(0) for state in text.states]
    turns = visits(teacher, rows, states, source.num_layers, num_steps, stock=runtime == "stock")
    for visit in turns:
        visit.run(load_layer(source, visit.layer, teacher.device))
        for row, outputs in enumerate(visit.outputs):
            drafts[row] += [_argmax(output[0], lm_head) for output in outputs]
    counts = [text.replay(number, draft) for number, draft in enumerate(drafts)]
    return Replay(counts=counts, metrics=summarise(text, counts, num_steps, runtime))


def require_evidence(before: Replay) -> None:
    """Refuse to judge by text on which nothing, or only one prompt, was drafted.

    Raises:
        UserError: too few prompts with a draft.
    """
    drafted = sum(counts.num_drafts > 0 for counts in before.counts)
    if drafted < MIN_PROMPTS:
        raise UserError(
            f"drafts after at least {MIN_PROMPTS} held-out prompts, to compare both heads on",
            f"{drafted} of {len(before.counts)} prompts with a draft",
            "prepare more held-out data, or raise num_prompts and num_tokens under [eval]",
        )


def _argmax(states: torch.Tensor, lm_head: torch.Tensor) -> list[int]:
    found: list[int] = []
    for chunk in states.split(CHUNK):
        found += F.linear(chunk, lm_head).argmax(-1).tolist()
    return found


def paired_difference(
    before: Sequence[AcceptanceCounts], after: Sequence[AcceptanceCounts]
) -> dict[str, Any]:
    """Acceptance after minus before, with 95 % intervals: mean accepted, and each position.

    Args:
        before: counters of each prompt.
        after: the same prompts with the other head.

    Returns:
        {"mean_accepted": number, "mean_accepted_interval": [low, high], "cumulative": one a
        position, "cumulative_interval": one a position, "num_prompts", "confidence"}
    """
    generator = np.random.default_rng(SEED)
    size = len(before)
    samples = generator.integers(0, size, (NUM_RESAMPLES, size))
    everything = np.arange(size)[None]
    new, old = _table(after), _table(before)
    point = (_cumulative(*new, everything) - _cumulative(*old, everything))[0]
    drawn = _cumulative(*new, samples) - _cumulative(*old, samples)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    mean_low, mean_high = np.quantile(drawn.sum(-1), [tail, 1 - tail])
    return {
        "mean_accepted": float(point.sum()),
        "mean_accepted_interval": [float(mean_low), float(mean_high)],
        "cumulative": point.tolist(),
        "cumulative_interval": [[float(a), float(b)] for a, b in zip(low, high, strict=True)],
        "num_prompts": size,
        "confidence": CONFIDENCE,
    }


def drops_too_far(difference: dict[str, Any], max_drop: float) -> bool:
    """Whether the whole interval of the drop in mean accepted lies beyond `max_drop`."""
    _, most_favourable = difference["mean_accepted_interval"]
    return bool(-most_favourable > max_drop)


Array = NDArray[np.float64]


def _table(counts: Sequence[AcceptanceCounts]) -> tuple[Array, Array]:
    """Drafts [P] and accepted [P, K] of each prompt."""
    drafts = np.array([counted.num_drafts for counted in counts], np.float64)
    return drafts, np.array([counted.accepted_per_position for counted in counts], np.float64)


def _cumulative(drafts: Array, accepted: Array, samples: NDArray[np.int64]) -> Array:
    """Acceptance at each position in every resample: [S, P] indices -> [S, K]."""
    return accepted[samples].sum(1) / np.maximum(drafts[samples].sum(1), 1)[:, None]
