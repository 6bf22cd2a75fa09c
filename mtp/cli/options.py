"""Options that several commands share, and how results are printed."""

from __future__ import annotations

import json
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from graft.errors import UsageError

Base = Annotated[Path, typer.Option("--base", help="The base model's folder.")]
Data = Annotated[Path, typer.Option("--data", help="Folder of `mtp data prepare`.")]
Head = Annotated[Path, typer.Option("--head", help="The head's folder.")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="TOML recipe; see recipes/.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 ...")]
Report = Annotated[Path | None, typer.Option("--report", help="Also write the JSON here.")]
EngineOptions = Annotated[
    str | None,
    typer.Option(help="More arguments of vllm.LLM, as JSON: '{\"tensor_parallel_size\": 2}'."),
]


class Runtime(StrEnum):
    """routed: each position on its own layer; stock: an unpatched vLLM, layer 0 repeated."""

    routed = "routed"
    stock = "stock"


class LinkKind(StrEnum):
    """The kinds of `graft.place.Link`, as the command line needs them."""

    auto = "auto"
    hard = "hard"
    reflink = "reflink"
    copy = "copy"


def parse_size(text: str) -> int:
    """A size as people write it, in bytes: 5GB and 5G are decimal, 5GiB is binary."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", text.strip(), re.I)
    size = 0
    if found:
        unit = 1024 if found[3] else 1000
        size = int(float(found[1]) * unit ** (" KMGT".index((found[2] or " ").upper())))
    if not size:
        raise typer.BadParameter(f"{text!r} is not a size, such as 5GB or 500MiB")
    return size


def parse_engine_options(text: str | None) -> dict[str, Any] | None:
    """The dictionary behind --engine-options.

    Raises:
        UserError: not a JSON object.
    """
    if text is None:
        return None
    try:
        options = json.loads(text)
    except json.JSONDecodeError:
        options = None
    if not isinstance(options, dict):
        raise UsageError(
            "a JSON object for --engine-options", text, "write '{\"tensor_parallel_size\": 2}'"
        )
    return options


def emit(result: dict[str, Any], as_json: bool, report: Path | None, table: Any) -> None:
    """Print a result as JSON or as a table, and write the JSON to `report` if one was named."""
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 100).print(table)
