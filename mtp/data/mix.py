"""How much of each category and source is trained on: weights, a budget of tokens, a seed.

Whole conversations are taken, in an order that the seed decides, until a part has its tokens.
A part with too few starts over, at most `max_repeats` times (Muennighoff et al. 2023,
"Scaling Data-Constrained Language Models": up to 4 epochs are worth nearly as much as new data);
what is still missing is reported, never filled from elsewhere. The held-out side is left whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graft.errors import UsageError, UserError
from mtp.recipe import MixRecipe


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one weight stands for and got; tokens are those of training rows."""

    name: str
    weight: float
    conversations: int
    tokens_found: int
    tokens_wanted: int
    tokens_taken: int

    @property
    def epochs(self) -> float:
        """How often the part is seen; above 1 it is oversampled."""
        return round(self.tokens_taken / max(self.tokens_found, 1), 3)

    def __str__(self) -> str:
        line = f"{self.name} {self.weight:g}: {self.tokens_taken} of {self.tokens_found} tokens"
        if self.epochs > 1:
            line += f", oversampled {self.epochs:g} times"
        missing = self.tokens_wanted - self.tokens_taken
        if missing > 0.01 * self.tokens_wanted:
            line += f", {missing} fewer than wanted"
        return line


def parse_weights(text: str) -> dict[str, float]:
    """The weights of `code=0.6,agent=0.4`.

    Raises:
        UserError: not of that form, or a weight that is no number above 0.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        name = name.strip()
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or name in weights or not weight:
            raise UsageError("weights such as code=0.6,agent=0.4", repr(text), "fix --mix")
        weights[name] = weight
    return checked_weights(weights)


def checked_weights(weights: dict[str, float]) -> dict[str, float]:
    """The weights, all above 0.

    Raises:
        UserError: one is not.
    """
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise UserError("a weight above 0", f"{name}={weight:g}", "correct the mix")
    return weights


def choose(
    names: list[tuple[str, ...]],
    kinds: np.ndarray,
    tokens: np.ndarray,
    digests: np.ndarray,
    recipe: MixRecipe,
) -> tuple[np.ndarray, list[Part]]:
    """How often each conversation is trained on, and what each part of the mix got.

    Args:
        names: for each kind, what a weight may call it, the more particular name first.
        kinds: [C] int64, each conversation's kind.
        tokens: [C] int64; 0 for conversations that may not be trained on.
        digests: [C] uint64, decide the order.
        recipe: weights and budget.

    Returns:
        ([C] int64, the parts in the order of the weights). Without weights all conversations are
        one part.

    Raises:
        UserError: a weight that names nothing.
    """
    weights = recipe.weights or {"everything": 1.0}
    part_of_kind = [next((n for n in known if n in weights), "") for known in names]
    if not recipe.weights:
        part_of_kind = ["everything"] * len(names)
    order = np.argsort(digests, kind="stable")
    members = {}
    for name in weights:
        chosen = np.asarray([part == name for part in part_of_kind], dtype=bool)
        mine = order[chosen[kinds[order]] & (tokens[order] > 0)]
        if not len(mine):
            known = ", ".join(sorted({n for k in names for n in k}))
            raise UserError(f"rows for each part of the mix ({known})", f"none for {name}",
                            "correct the mix, or add a source")  # fmt: skip
        members[name] = mine
    found = {name: int(tokens[mine].sum()) for name, mine in members.items()}
    scale = sum(weights.values())
    # Without a budget: as much as can be had with no part oversampled.
    budget = recipe.tokens or min(found[name] * scale / weight for name, weight in weights.items())
    copies = np.zeros(len(kinds), dtype=np.int64)
    parts = []
    for name, weight in weights.items():
        wanted = round(budget * weight / scale)
        taken = _take(members[name], tokens, wanted, recipe.max_repeats, copies)
        parts.append(
            Part(
                name=name,
                weight=weight,
                conversations=int((copies[members[name]] > 0).sum()),
                tokens_found=found[name],
                tokens_wanted=wanted,
                tokens_taken=taken,
            )
        )
    return copies, parts


def _take(
    members: np.ndarray, tokens: np.ndarray, wanted: int, max_repeats: int, copies: np.ndarray
) -> int:
    """Count up `copies` until `wanted` tokens are reached as nearly as may be; the tokens taken."""
    total = int(tokens[members].sum())
    rounds = min(wanted // total, max_repeats)
    copies[members] += rounds
    taken = rounds * total
    if rounds < max_repeats:
        ends = taken + np.cumsum(tokens[members])
        # The conversation over the end is taken when that is nearer than stopping before it.
        middles = ends - tokens[members] / 2
        rest = members[middles <= wanted]
        copies[rest] += 1
        taken += int(tokens[rest].sum())
    return taken
