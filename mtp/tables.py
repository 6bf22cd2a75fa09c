"""Tables for people: acceptance as rows, positions 1-based."""

from __future__ import annotations

from typing import Any


def acceptance_table(rows: list[tuple[str, dict[str, Any]]], title: str = "") -> Any:
    """A rich table of labelled metrics (dicts as `AcceptanceCounts.as_dict` gives them)."""
    from rich.table import Table

    positions = max((len(metrics["cumulative"]) for _, metrics in rows), default=0)
    table = Table(title=title or None, title_justify="left")
    table.add_column("")
    table.add_column("mean accepted", justify="right")
    for position in range(positions):
        table.add_column(f"pos {position + 1}", justify="right")
    table.add_column("acc-len", justify="right")
    table.add_column("drafts", justify="right")
    for label, metrics in rows:
        cells = [f"{value:.3f}" for value in metrics["cumulative"]]
        cells += [""] * (positions - len(cells))
        table.add_row(
            label,
            f"{metrics['mean_accepted']:.3f}",
            *cells,
            f"{metrics['acc_len']:.3f}",
            f"{metrics['num_drafts']}",
        )
    return table


def forced_table(rows: list[tuple[str, dict[str, Any]]]) -> Any:
    """A rich table of a DSpark draft's teacher-forced metrics (`mtp.dspark.evaluate`)."""
    from rich.table import Table

    table = Table(title="teacher forced, as the reference trainer defines it", title_justify="left")
    columns = ("accept-len", "greedy", "accept rate", "full acc", "missed mass", "ECE", "blocks")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    names = ("accept_len", "greedy_accept_len", "accept_rate", "full_acc", "missed_mass",
             "calibration_error")  # fmt: skip
    for label, metrics in rows:
        numbers = [f"{metrics[name]:.3f}" for name in names]
        table.add_row(label, *numbers, str(metrics["num_blocks"]))
    return table
