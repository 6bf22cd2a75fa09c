"""`mtp head extract`: a head out of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mtp import __version__
from mtp.cli.options import AsJson, Out, Overwrite

head_app = typer.Typer(no_args_is_help=True, help="Head folders.")


@head_app.command("extract")
def extract_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint with an MTP head.")],
    out: Out,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Take the head out of a checkpoint: a start for `mtp train`, or for another graft.

    \b
    Example:
      mtp head extract base --out head
    """
    from graft.extract import extract_head

    result = extract_head(checkpoint, out, overwrite=overwrite, tool=f"mtp-graft {__version__}")
    print(json.dumps(result.as_dict(), indent=1) if as_json else result.as_text())
