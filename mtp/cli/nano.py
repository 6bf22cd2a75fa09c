"""`mtp nano`: the demo's small base and its training text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp.cli.options import Device, Out, Overwrite, RecipeFile

nano_app = typer.Typer(no_args_is_help=True, help="The demo's small base and its training text.")


@nano_app.command("traces")
def nano_traces(
    out: Annotated[Path, typer.Option("--out", help="JSONL file to write.")],
    conversations: Annotated[int, typer.Option(min=1, help="How many to record.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the agent's choices.")] = 0,
) -> None:
    """Record a scripted agent that really works on copies of standard-library modules.

    \b
    Example:
      mtp nano traces --out traces.jsonl
    """
    from mtp.nano.agent import record_traces

    record_traces(out, num_conversations=conversations, seed=seed)
    print(f"{out}: {conversations} conversations")


@nano_app.command("code")
def nano_code(out: Out, overwrite: Overwrite = False) -> None:
    """Copy real Python source: the standard library of the running interpreter.

    \b
    Example:
      mtp nano code --out code
    """
    from mtp.nano.stdlib import copy_stdlib

    print(f"{out}: {copy_stdlib(out, overwrite=overwrite)} files")


@nano_app.command("base")
def nano_base(
    traces: Annotated[Path, typer.Option(help="JSONL of `mtp nano traces`.")],
    code: Annotated[Path, typer.Option(help="Folder of `mtp nano code`.")],
    out: Out,
    recipe: RecipeFile = None,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Train the demo's small Qwen3.5-MoE base, with its tokenizer.

    \b
    Example:
      mtp nano base --traces traces.jsonl --code code --out base
    """
    from mtp.nano.base import train_base
    from mtp.recipe import load_recipe

    report = train_base(
        out,
        traces=traces,
        code=code,
        recipe=load_recipe(recipe).base,
        device=device,
        seed=seed,
        overwrite=overwrite,
    )
    print(
        f"{out}: {report.num_parameters / 1e6:.1f}M parameters, {report.steps} steps in "
        f"{report.seconds:.0f} s, loss {report.first_loss:.2f} -> {report.final_loss:.2f}"
    )
