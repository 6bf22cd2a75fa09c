"""`mtp quantize`: a head to NVFP4, back to BF16, or a base's own experts to NVFP4."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperOption

from mtp.cli.options import AsJson, Device, Head, Overwrite, RecipeFile, Report, emit

QUANTIZED_HEAD = Path("head-nvfp4")
PRINTING = {"overwrite", "as_json", "report"}
# Of each mode, by its flag: the options that mean something there, and those that it needs.
MODES: dict[str, tuple[set[str], set[str]]] = {
    "trunk": ({"base", "out", "data", "scheme", "recipe", "device", *PRINTING}, {"base", "out"}),
    "dequantize": ({"head", "out", *PRINTING}, {"out"}),
}


class SchemeName(StrEnum):
    """Weights and activations in FP4, or weights alone."""

    w4a4 = "w4a4"
    w4a16 = "w4a16"


class AlgorithmName(StrEnum):
    """The algorithms of `quantize.calibration`, as the command line needs them."""

    max = "max"
    mse = "mse"
    local_hessian = "local_hessian"
    four_over_six = "four_over_six"


def quantize_command(
    context: typer.Context,
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

    \b
    Example:
      mtp quantize --head head --base base --data data --out head-nvfp4
    """
    _require_options(context)
    form: Any = scheme.value if scheme else None  # a Scheme, of which mypy knows only str
    failed = None
    if trunk:
        assert base is not None
        result = _trunk(base, out, data, form, recipe, device, overwrite)
        sizes = f"{result['bytes_before']} -> {result['bytes_after']} bytes"
        unseen = _never_routed(result["coverage"])
        table: Any = f"{out}: {result['num_matrices']} matrices, {sizes}{unseen}"
    elif dequantize:
        from quantize.twin import dequantize as write_twin

        result, table = write_twin(head, out, overwrite=overwrite), f"{out}: BF16 twin of {head}"
    else:
        asked = {
            "scheme": form, "algorithm": algorithm.value, "max_drop": max_drop, "qad_steps": qad,
        }  # fmt: skip
        result, failed = _head(head, base, data, out, recipe, asked, device, overwrite)
        table = _table(result, out)
    emit(result, as_json, report, table)
    if failed is not None:
        raise failed


def _head(
    head: Path,
    base: Path | None,
    data: Path | None,
    out: Path,
    recipe: Path | None,
    asked: dict[str, Any],
    device: str,
    overwrite: bool,
) -> tuple[dict[str, Any], Exception | None]:
    """The report, and what is raised once it is printed where the gate failed."""
    if base is None or data is None:
        raise typer.BadParameter("--base and --data are needed to calibrate and to measure")
    from mtp.recipe import load_recipe
    from quantize import command
    from quantize.gate import GateFailed

    settings = command.Settings(**asked)
    try:
        return command.quantize(
            head, base, data, out, load_recipe(recipe), settings, device=device, overwrite=overwrite
        ), None
    except GateFailed as error:
        return error.result, error


def _require_options(context: typer.Context) -> None:
    """Refuse options that the mode would ignore, and a mode without those that it needs.

    Raises:
        typer.BadParameter: naming them.
    """
    spelled = {
        option.name: option.opts[0]
        for option in context.command.params
        if isinstance(option, TyperOption)
    }
    given = {
        name
        for name in spelled
        if name and (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }
    for mode, (known, needed) in MODES.items():
        if not context.params[mode]:
            continue
        if strangers := sorted(spelled[name] for name in given - known - {mode}):
            raise typer.BadParameter(f"--{mode} has no use for {', '.join(strangers)}")
        if missing := sorted(spelled[name] for name in needed - given):
            raise typer.BadParameter(f"--{mode} needs {' and '.join(missing)}")


def _trunk(
    base: Path,
    out: Path,
    data: Path | None,
    scheme: Any,
    recipe: Path | None,
    device: str,
    overwrite: bool,
) -> dict[str, Any]:
    from mtp.recipe import load_recipe
    from quantize.trunk import quantize_trunk

    return quantize_trunk(
        base, out, data=data, scheme=scheme,
        calibration_tokens=load_recipe(recipe).quantize.calibration_tokens,
        device=device, overwrite=overwrite,
    )  # fmt: skip


def _table(result: dict[str, Any], out: Path) -> Any:
    """Acceptance before and after, under what it cost."""
    from mtp.tables import acceptance_table

    difference = result["difference"]
    low, high = difference["mean_accepted_interval"]
    title = (
        f"{out}: {result['bytes_before']} -> {result['bytes_after']} bytes, mean accepted "
        f"{difference['mean_accepted']:+.4f} ({low:+.4f} to {high:+.4f})"
        f"{_never_routed(result['coverage'])}"
    )
    rows = [("BF16", result["before"]), ("NVFP4 experts", result["after"])]
    return acceptance_table(rows, title)


def _never_routed(coverage: list[dict[str, Any]]) -> str:
    """A remark on the experts that calibration never reached; nothing where it reached all."""
    count = sum(len(layer["never_routed"]) for layer in coverage)
    return f"; {count} experts saw no token while calibrating, see coverage" if count else ""
