"""`mtp plot`: the curves of a run as one picture, from its history.jsonl alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graft.errors import UserError
from mtp.history import HISTORY, read_history


def plot_run(folder: Path, out: Path | None = None) -> Path:
    """Draw loss, acceptance, gradient norm and learning rate over steps.

    Args:
        folder: a run folder, or a head folder, which holds its run's history.
        out: PNG to write; `curves.png` in `folder` when not given.

    Returns:
        The picture's path.

    Raises:
        UserError: `out` is no PNG, no history, one without a step, or matplotlib is not installed.
    """
    out = out or folder / "curves.png"
    if out.suffix.lower() != ".png":
        raise UserError("a picture's name that ends in .png", f"{out}", "choose another --out")
    records = read_history(folder / HISTORY)
    if not records:
        raise UserError(f"a step in {folder / HISTORY}", "none", "train first")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "matplotlib to be installed", "none", "run `pip install matplotlib`"
        ) from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves) in zip(figure.subplots(2, 2).flat, panels(records), strict=True):
        for label, steps, values in curves:
            axes.plot(steps, values, marker="o" if len(steps) < 30 else None, label=label, ms=3)
        axes.set(title=title, xlabel="optimizer step")
        axes.grid(alpha=0.3)
        if curves and curves[0][0]:
            axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    return out


def panels(records: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, list, list]]]]:
    """Titles, and for each its curves: label, steps, values. Positions count from 1."""
    return [
        ("loss by position", _by_position(records, "loss_per_position")),
        ("held-out acceptance by position, cumulative", _by_position(records, "cumulative")),
        ("gradient norm, before clipping", [_curve(records, "gradient_norm")]),
        ("learning rate", [_curve(records, "learning_rate")]),
    ]


def _by_position(records: list[dict[str, Any]], key: str) -> list[tuple[str, list, list]]:
    measured = [record for record in records if key in record]
    steps = [record["step"] for record in measured]
    num_positions = len(measured[0][key]) if measured else 0
    return [
        (f"position {k + 1}", steps, [record[key][k] for record in measured])
        for k in range(num_positions)
    ]


def _curve(records: list[dict[str, Any]], key: str) -> tuple[str, list, list]:
    return "", [record["step"] for record in records], [record[key] for record in records]
