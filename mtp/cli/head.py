"""`mtp train`, `mtp eval`: from data to a measured head."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mtp.cli.options import (
    AsJson,
    Base,
    Data,
    Device,
    Head,
    Out,
    Overwrite,
    RecipeFile,
    Report,
    Runtime,
    emit,
)

DEFAULT_RECIPE = Path("recipe.toml")


class DraftKind(StrEnum):
    """What `mtp train` trains, as in `train.draft` of a recipe."""

    mtp = "mtp"
    dspark = "dspark"


def recipe_file(argument: Path | None, option: Path | None) -> Path | None:
    """The recipe that one of the two names, or ./recipe.toml where there is one."""
    if argument and option:
        raise typer.BadParameter("a recipe and --recipe both name one")
    return argument or option or (DEFAULT_RECIPE if DEFAULT_RECIPE.is_file() else None)


def train_command(
    base: Base,
    data: Data,
    recipe: Annotated[
        Path | None,
        typer.Argument(help="TOML recipe; ./recipe.toml when there is one.", show_default=False),
    ] = None,
    recipe_option: RecipeFile = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE, over the recipe; repeat.")
    ] = None,
    draft: Annotated[
        DraftKind | None, typer.Option(help="What to train, over the recipe.", show_default="mtp")
    ] = None,
    out: Out = Path("head"),
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many optimizer steps.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an earlier run, which --overwrite spares.")
    ] = False,
    shard: Annotated[
        bool, typer.Option("--shard", help="Split the state among processes (FSDP2).")
    ] = False,
    tracker: Annotated[
        str | None, typer.Option(help="tensorboard or wandb, beside history.jsonl.")
    ] = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Distil a head, or a DSpark draft, from the base.

    \b
    Example:
      mtp train recipes/nano/recipe.toml --base base --data data --out head
    """
    from mtp.recipe import load_recipe
    from mtp.tables import acceptance_table
    from mtp.train import train

    chosen = [f"train.draft={draft.value}"] if draft else []
    summary = train(
        base,
        data,
        out,
        load_recipe(recipe_file(recipe, recipe_option), [*(settings or ()), *chosen]),
        device=device,
        overwrite=overwrite,
        resume=resume,
        max_steps=max_steps,
        shard=shard,
        tracker=tracker,
    )
    if summary is None:  # another process reports
        return
    work = f"{summary['steps']} steps, {summary['tokens']} tokens in {summary['seconds']:.0f} s"
    title = f"{out}: {work}; best at step {summary['best_step']}"
    before, after = summary["before"], summary["after"]
    if after["mean_accepted"] < before["mean_accepted"]:
        title += "; before training more was accepted"
    rows = [("before", before), ("trained", after)]
    emit(summary, as_json, None, acceptance_table(rows, title))


def eval_command(
    base: Base,
    data: Data,
    head: Head = Path("head"),
    draft: Annotated[
        Path | None, typer.Option(help="A DSpark draft's folder, instead of a head's.")
    ] = None,
    runtime: Annotated[
        Runtime | None,
        typer.Option(help="Which vLLM is predicted; by default the one the head was trained for."),
    ] = None,
    recipe: RecipeFile = None,
    device: Device = "auto",
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Predict what vLLM will measure: replay speculative decoding on held-out prompts.

    \b
    Example:
      mtp eval --base base --head head --data data --report eval.json
    """
    from mtp.acceptance import evaluate
    from mtp.recipe import load_recipe
    from mtp.tables import acceptance_table, forced_table

    if draft is not None:
        from rich.console import Group

        from mtp.dspark.evaluate import evaluate_folder

        metrics = evaluate_folder(base, draft, data, load_recipe(recipe), device=device)
        rows = [("all", metrics), *metrics["by_category"].items()]
        tables = Group(
            acceptance_table(rows, f"{draft}, predicted"),
            forced_table(
                [("continuations", metrics["teacher_forced"]), ("held-out", metrics["validation"])]
            ),
        )
        emit(metrics, as_json, report, tables)
        return
    metrics = evaluate(
        base,
        head,
        data,
        load_recipe(recipe).eval,
        runtime=runtime.value if runtime else None,
        device=device,
    )
    rows = [("all", metrics), *metrics["by_category"].items()]
    emit(
        metrics, as_json, report, acceptance_table(rows, f"{head}, predicted, {metrics['runtime']}")
    )
