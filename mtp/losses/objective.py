"""From a recipe to the loss of a batch: terms at a point of training, weights, runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graft.errors import UserError
from mtp.losses.terms import Objective
from mtp.recipe import LossRecipe, LossTerms


def objective_at(recipe: LossRecipe, progress: float) -> Objective:
    """The terms at a fraction of training, 0 at its first step and below 1 at its last.

    Without a schedule, those of the recipe; with one, those of the first stage that `progress`
    has not passed.
    """
    terms: LossTerms = recipe.schedule[-1] if recipe.schedule else recipe
    terms = next((stage for stage in recipe.schedule if progress < stage.until), terms)
    return Objective(
        ce=terms.ce,
        kl=terms.kl,
        tv=terms.tv,
        lk=terms.lk,
        e2e_tv=terms.e2e_tv,
        temperature=recipe.temperature,
        lk_eta=recipe.lk_eta,
    )


def stage_begin(recipe: LossRecipe, progress: float) -> float:
    """The fraction of training at which the terms of `progress` took over: 0 without a schedule."""
    return max((stage.until for stage in recipe.schedule if stage.until <= progress), default=0.0)


def position_weights(recipe: LossRecipe, num_steps: int) -> torch.Tensor:
    """[K]: the recipe's own list as it stands, or decay**k normalised to sum 1 (the form of
    FastMTP, arXiv 2509.18362)."""
    if recipe.position_weights:
        return torch.tensor(recipe.position_weights)
    weights = torch.tensor([recipe.position_decay**k for k in range(num_steps)])
    return weights / weights.sum()


def require_categories(weights: Mapping[str, float], categories: Sequence[str]) -> None:
    """Refuse weights of categories that no training row has, and those that leave nothing to learn.

    Args:
        weights: of the recipe.
        categories: those of the training rows, each once.

    Raises:
        UserError: a category that is not there, or a weight of 0 for all that are.
    """
    there = ", ".join(sorted(categories))
    if unknown := sorted(weights.keys() - set(categories)):
        raise UserError(
            f"category_weights of the training rows' categories: {there}",
            ", ".join(unknown),
            "correct the recipe, or prepare data that has them",
        )
    if all(weights.get(category, 1.0) == 0 for category in categories):
        raise UserError(
            f"a category weight above 0 among those of the training rows: {there}",
            "0 for each",
            "correct the recipe",
        )


def category_weights(weights: Mapping[str, float], categories: Sequence[str]) -> torch.Tensor:
    """[B]: the weight of each row's category; 1 for those that the recipe does not name."""
    return torch.tensor([weights.get(category, 1.0) for category in categories])
