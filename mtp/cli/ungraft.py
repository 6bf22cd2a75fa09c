"""`mtp ungraft`: the base back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mtp.cli.options import AsJson, LinkKind, Out, Overwrite


def ungraft_command(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that `mtp graft` wrote.")],
    out: Out,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="What was grafted onto; needed if the graft dropped bytes."),
    ] = None,
    link: Annotated[
        LinkKind, typer.Option(help="How weight files are placed; auto: hard, reflink, copy.")
    ] = LinkKind.auto,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write the base back as it was: byte for byte where the graft only added.

    Where it dropped an old head, re-emitted a shard or left the vision tower out, the base must be
    given, and is checked against the manifest. Files changed since the graft are refused.

    \b
    Example:
      mtp ungraft grafted --out base
    """
    from graft.ungraft import plan_ungraft, write_ungraft

    plan = plan_ungraft(checkpoint, base)
    result = write_ungraft(plan, out, overwrite=overwrite, link=link.value)
    print(json.dumps(result.as_dict(), indent=1) if as_json else result.as_text())
