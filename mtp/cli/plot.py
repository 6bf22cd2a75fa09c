"""`mtp plot`: the curves of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run or of a head.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="PNG to write; RUN/curves.png by default.")
    ] = None,
) -> None:
    """Draw a run's loss, acceptance and learning rate as a PNG.

    \b
    Example:
      mtp plot head.run
    """
    from mtp.plots import plot_run

    print(plot_run(run, out))
