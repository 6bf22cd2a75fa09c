"""`mtp train`, `mtp eval`, `mtp quantize`: from data to a measured head."""

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
QUANTIZED_HEAD = Path("head-nvfp4")


class SchemeName(StrEnum):
    """Weights and activations in FP4, or weights alone."""

    w4a4 = "w4a4"
    w4a16 = "w4a16"


class DraftKind(StrEnum):
    """What `mtp train` trains, as in `train.draft` of a recipe."""

    mtp = "mtp"
    dspark = "dspark"


class AlgorithmName(StrEnum):
    """The algorithms of `quantize.calibration`, as the command line needs them."""

    max = "max"
    mse = "mse"
    local_hessian = "local_hessian"
    four_over_six = "four_over_six"


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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier run.")] = False,
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

    Example: mtp train recipes/nano/recipe.toml --base base --data data --out head
    """
    from mtp.recipe import load_recipe
    from mtp.tables import acceptance_table
    from mtp.train import train

    if recipe and recipe_option:
        raise typer.BadParameter("a recipe and --recipe both name one")
    found = recipe or recipe_option
    if found is None and DEFAULT_RECIPE.is_file():
        found = DEFAULT_RECIPE
    summary = train(
        base,
        data,
        out,
        load_recipe(found, [*(settings or ()), *([f"train.draft={draft.value}"] if draft else [])]),
        device=device,
        overwrite=overwrite,
        resume=resume,
        max_steps=max_steps,
        shard=shard,
        tracker=tracker,
    )
    if summary is None:  # another process reports
        return
    title = (
        f"{out}: {summary['steps']} steps, {summary['tokens']} tokens in "
        f"{summary['seconds']:.0f} s; best at step {summary['best_step']}"
    )
    rows = [("warm start", summary["before"]), ("trained", summary["after"])]
    emit(summary, as_json, None, acceptance_table(rows, title))


def eval_command(
    base: Base,
    data: Data,
    head: Head = Path("head"),
    draft: Annotated[
        Path | None, typer.Option(help="A DSpark draft's folder, instead of a head's.")
    ] = None,
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
        base, head, data, load_recipe(recipe).eval, runtime=runtime.value, device=device
    )
    rows = [("all", metrics), *metrics["by_category"].items()]
    emit(metrics, as_json, report, acceptance_table(rows, f"{head}, predicted, {runtime.value}"))


def quantize_command(
    head: Head = Path("head"),
    base: Annotated[Path | None, typer.Option(help="The base; its states calibrate.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of `mtp data prepare`.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = QUANTIZED_HEAD,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="NVFP4 head to BF16.")] = False,
    trunk: Annotated[
        bool, typer.Option("--trunk", help="Quantize the base's experts, not a head's.")
    ] = False,
    scheme: Annotated[
        SchemeName | None, typer.Option(help="Default: as the base's experts, else w4a4.")
    ] = None,
    algorithm: Annotated[
        AlgorithmName, typer.Option(help="How block scales are chosen; only max without CUDA.")
    ] = AlgorithmName.max,
    max_drop: Annotated[
        float, typer.Option(help="Fail when mean accepted provably falls by more.")
    ] = 0.01,
    qad: Annotated[
        int, typer.Option(min=0, help="If that fails, distil so many steps and try again.")
    ] = 0,
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
    from quantize import command
    from quantize.gate import GateFailed

    if trunk:
        from quantize.trunk import quantize_trunk

        if base is None or out == QUANTIZED_HEAD:
            raise typer.BadParameter("--trunk needs --base and --out")
        result = quantize_trunk(
            base, out, data=data, scheme=scheme.value if scheme else None,
            calibration_tokens=load_recipe(recipe).quantize.calibration_tokens,
            device=device, overwrite=overwrite,
        )  # fmt: skip
        sizes = f"{result['bytes_before']} -> {result['bytes_after']} bytes"
        emit(result, as_json, report, f"{out}: {result['num_matrices']} matrices, {sizes}")
        return
    if dequantize:
        command.dequantize(head, out, overwrite=overwrite)
        print(f"{out}: BF16 twin of {head}")
        return
    if base is None or data is None:
        raise typer.BadParameter("--base and --data are needed to calibrate and to measure")
    settings = command.Settings(
        scheme=scheme.value if scheme else None,
        algorithm=algorithm.value,
        max_drop=max_drop,
        qad_steps=qad,
    )
    failed = None
    try:
        result = command.quantize(
            head, base, data, out, load_recipe(recipe), settings, device=device, overwrite=overwrite
        )
    except GateFailed as error:
        failed, result = error, error.result
    difference = result["difference"]
    low, high = difference["mean_accepted_interval"]
    title = (
        f"{out}: {result['bytes_before']} -> {result['bytes_after']} bytes, mean accepted "
        f"{difference['mean_accepted']:+.4f} ({low:+.4f} to {high:+.4f})"
    )
    rows = [("BF16", result["before"]), ("NVFP4 experts", result["after"])]
    emit(result, as_json, report, acceptance_table(rows, title))
    if failed is not None:
        raise failed
