"""`mtp inspect`: what a checkpoint is, and what vLLM will do with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mtp.cli.options import AsJson


def inspect_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, grafted or not.")],
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint is, what vLLM will do with its head, and what is wrong with it.

    Reads headers and configs only. Exit code 1 if an error was found: the checkpoint can't be
    served, or its drafts would be garbage. Warnings leave it 0.

    \b
    Example:
      mtp inspect grafted
    """
    from graft.inspect import inspect_checkpoint
    from mtp.serving.routing import routing_in_words

    inspection = inspect_checkpoint(checkpoint)
    routing = routing_in_words()
    if as_json:
        print(json.dumps({**inspection.as_dict(), "routing": routing}, indent=1))
    else:
        print(f"{inspection.as_text()}\n{routing}")
    if not inspection.servable:
        raise typer.Exit(1)
