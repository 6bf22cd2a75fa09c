"""`mtp train`, `mtp eval`, `mtp quantize`: from data to a measured head."""

from __future__ import annotations

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


def train_command(
    base: Base,
    data: Data,
    out: Out = Path("head"),
    recipe: RecipeFile = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Distil a head from the base.

    Example: mtp train --base base --data data --out head --recipe recipes/nano/recipe.toml
    """
    from mtp.recipe import load_recipe
    from mtp.tables import acceptance_table
    from mtp.train import train

    summary = train(base, data, out, load_recipe(recipe), device=device, overwrite=overwrite)
    title = f"{out}: {summary['tokens']} tokens in {summary['seconds']:.0f} s"
    rows = [("warm start", summary["before"]), ("trained", summary["after"])]
    emit(summary, as_json, None, acceptance_table(rows, title))


def eval_command(
    base: Base,
    data: Data,
    head: Head = Path("head"),
    runtime: Annotated[Runtime, typer.Option(help="Which vLLM is predicted.")] = Runtime.routed,
    recipe: RecipeFile = None,
    device: Device = "auto",
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Predict what vLLM will measure: replay speculative decoding on held-out prompts.

    Example: mtp eval --base base --head head --data data --report eval.json
    """
    from mtp.acceptance import evaluate
    from mtp.recipe import load_recipe
    from mtp.tables import acceptance_table

    metrics = evaluate(
        base, head, data, load_recipe(recipe).eval, runtime=runtime.value, device=device
    )
    rows = [("all", metrics), *metrics["by_category"].items()]
    emit(metrics, as_json, report, acceptance_table(rows, f"{head}, predicted, {runtime.value}"))


def quantize_command(
    head: Head = Path("head"),
    base: Annotated[Path | None, typer.Option(help="The base; its states calibrate.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of `mtp data prepare`.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("head-nvfp4"),
    dequantize: Annotated[bool, typer.Option("--dequantize", help="NVFP4 head to BF16.")] = False,
    recipe: RecipeFile = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Quantize a head's routed experts to NVFP4, with acceptance before and after.

    Example: mtp quantize --head head --base base --data data --out head-nvfp4
    """
    from mtp.recipe import load_recipe
    from mtp.tables import acceptance_table
    from quantize import experts

    if dequantize:
        experts.dequantize(head, out, overwrite=overwrite)
        print(f"{out}: BF16 twin of {head}")
        return
    if base is None or data is None:
        raise typer.BadParameter("--base and --data are needed to calibrate and to measure")
    result = experts.quantize(
        head, base, data, out, load_recipe(recipe), device=device, overwrite=overwrite
    )
    title = f"{out}: {result['bytes_before']} -> {result['bytes_after']} bytes"
    rows = [("BF16", result["before"]), ("NVFP4 experts", result["after"])]
    emit(result, as_json, report, acceptance_table(rows, title))
