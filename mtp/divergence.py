"""When training has gone wrong for good: numbers that are none, and a loss that explodes.

Found before the optimizer's step, so the weights and the last checkpoint are still sound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from graft.errors import UserError

WINDOW, EARLY = 100, 10
MAX_NAMED_ROWS = 6


def what_diverged(loss: float, gradient_norm: float, earlier: Sequence[float]) -> str | None:
    """Say what is wrong with a step, or None.

    A loss explodes when it is both ten times the median of the last WINDOW losses and above every
    one of the first EARLY: a hard batch late in training is not better than the untrained draft.

    Args:
        loss: of this step.
        gradient_norm: of this step, before clipping.
        earlier: losses of the steps before that had the same terms: others have another scale.
    """
    if not math.isfinite(loss):
        return f"a loss of {loss}"
    if not math.isfinite(gradient_norm):
        return f"a gradient of norm {gradient_norm}"
    if len(earlier) < 2 * EARLY:
        return None
    usual = sorted(earlier[-WINDOW:])[len(earlier[-WINDOW:]) // 2]
    if loss > 10 * usual and loss > max(earlier[:EARLY]):
        return f"a loss of {loss:.4g} where {usual:.4g} is usual"
    return None


def divergence_error(step: int, what: str, rows: Any, indices: list[int], last: str) -> UserError:
    """The error that ends the run.

    Args:
        step: the optimizer step, counted from 1.
        what: from `what_diverged`.
        rows: the training split.
        indices: rows of the batch, those under suspicion.
        last: the last good checkpoint, or "none yet".
    """
    named = [
        f"row {index}: {rows[index]['conversation_id']} of {rows[index]['source']}"
        for index in indices[:MAX_NAMED_ROWS]
    ]
    more = f" and {len(indices) - MAX_NAMED_ROWS} more" if len(indices) > MAX_NAMED_ROWS else ""
    return UserError(
        "a finite loss that does not explode",
        f"{what} at step {step}, in a batch of {'; '.join(named)}{more}",
        f"look at these rows, or lower the learning rate; last good checkpoint: {last}",
    )
