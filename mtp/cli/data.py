"""`mtp data`: traces and code in, training rows out."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp.cli import data_options as options
from mtp.cli.options import AsJson, Base, Data, Device, Out, Overwrite

if TYPE_CHECKING:
    from mtp.data.report import PrepareReport
    from mtp.recipe import MixRecipe

data_app = typer.Typer(no_args_is_help=True, help="Traces and code in, training rows out.")


@data_app.command("prepare")
def data_prepare(
    base: Base,
    source: options.Source,
    out: Out,
    max_length: options.MaxLength = 4096,
    held_out_percent: options.HeldOutPercent = 5,
    max_skip: options.MaxSkip = 0.01,
    seed: options.Seed = 0,
    thinking: options.Thinking = "keep",
    allow_missing_tools: options.AllowMissingTools = False,
    licence: options.Licence = "unknown",
    format_name: options.FormatName = None,
    mapping: options.Mapping = None,
    where: options.Where = None,
    near_duplicates: options.NearDuplicates = "together",
    decontaminate: options.Decontaminate = None,
    scan: options.Scan = None,
    mix: options.Mix = None,
    tokens: options.Tokens = None,
    recipe: options.MixRecipeFile = None,
    workers: options.Workers = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Render conversations and code with the base's tokenizer, and mask what is supervised.

    \b
    Example:
      mtp data prepare --base base --source traces.jsonl --source src/ \\
        --out data
    """
    from mtp.data.prepare import prepare

    report = prepare(
        base,
        source,
        out,
        max_length=max_length,
        held_out_percent=held_out_percent,
        seed=seed,
        max_skip=max_skip,
        thinking=thinking,
        allow_missing_tools=allow_missing_tools,
        default_licence=licence,
        format_name=format_name,
        mapping=mapping,
        where=where or (),
        near_duplicates=near_duplicates,
        decontaminate=decontaminate or (),
        mix=_chosen_mix(recipe, mix, tokens),
        scan=scan,
        num_workers=workers,
        overwrite=overwrite,
    )
    _print_report(report, as_json=as_json)


def _chosen_mix(recipe: Path | None, mix: str | None, tokens: int | None) -> MixRecipe:
    """The recipe's mix, with what the command line says instead."""
    from mtp.data.mix import parse_weights
    from mtp.recipe import load_recipe

    chosen = load_recipe(recipe).mix
    if mix is not None:
        chosen = replace(chosen, weights=parse_weights(mix))
    return chosen if tokens is None else replace(chosen, tokens=tokens)


def _print_report(report: PrepareReport, *, as_json: bool) -> None:
    from mtp.data.store import SCHEMA_VERSION

    if not as_json:
        print(report.as_text())
        return
    for row in report.broken[:5]:
        print(f"mtp: skipped {row}", file=sys.stderr)
    print(json.dumps({"schema_version": SCHEMA_VERSION, **report.as_dict()}, indent=1))


@data_app.command("cache")
def data_cache(
    base: Base,
    data: Data,
    out: Out,
    split: Annotated[
        list[str] | None, typer.Option(help="train or held_out; both when not given.")
    ] = None,
    max_gigabytes: Annotated[float, typer.Option(help="Refuse to write more.")] = 100.0,
    shard_gigabytes: Annotated[float, typer.Option(help="Size of a shard.")] = 1.0,
    tokens_per_batch: Annotated[int, typer.Option(help="Tokens of one forward pass.")] = 8192,
    device: Device = "auto",
    server: Annotated[
        str | None, typer.Option(help="URL of a vLLM that extracts hidden states.")
    ] = None,
    server_states: Annotated[
        Path | None, typer.Option(help="The folder that this vLLM writes to.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="Also continue its held-out prompts.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write the base's hidden states of every row, so that training needs no base in memory.

    The same command goes on where an interrupted one stopped. With a recipe, what `mtp train`
    measures on is written too; without one, the first training loads the base for that. A recipe of
    a DSpark draft also keeps the output of the layers that it reads.

    \b
    Example:
      mtp data cache --base base --data data --out states
    """
    from graft.reader import Checkpoint
    from mtp.data.store import SPLITS
    from mtp.held_out import held_out_text
    from mtp.recipe import load_recipe
    from mtp.teacher import open_maker
    from mtp.teacher.cache import build_cache

    chosen = load_recipe(recipe)
    maker = open_maker(base, device=device, server=server, server_states=server_states)
    report = build_cache(
        maker,
        base,
        data,
        out,
        splits=split or list(SPLITS),
        max_gigabytes=max_gigabytes,
        shard_gigabytes=shard_gigabytes,
        tokens_per_batch=tokens_per_batch,
        layers=chosen.layers_read(int(Checkpoint(base).text_config["num_hidden_layers"])),
        overwrite=overwrite,
    )
    if recipe is not None:
        held_out_text(maker, base, data, chosen, cache=out)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print(
            f"{out}: {report['rows']} rows, {report['tokens']} tokens in {report['shards']} shards"
        )


@data_app.command("regenerate")
def data_regenerate(
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server, up to /v1.")],
    data: Annotated[
        list[str], typer.Option(help="What `prepare` takes as --source, prompts too; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="JSON Lines to write, or to go on with.")],
    base: Annotated[
        Path | None, typer.Option("--base", help="The served folder; its digests are recorded.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="As in serving.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="As in serving.")] = None,
    top_k: Annotated[int | None, typer.Option(help="As in serving; vLLM's.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 4096,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    thinking: Annotated[str, typer.Option(help="keep or strip, as it will be served.")] = "keep",
    concurrency: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="Conversations at most.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer.")] = 600.0,
    tries: Annotated[int, typer.Option(min=1, help="For one answer, the waits doubling.")] = 6,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Replay conversations with the base's own answers: training data as it will be served.

    Run the same command again to go on after a stop. A key is read from OPENAI_API_KEY.

    \b
    Example:
      mtp data regenerate --url http://localhost:8000/v1 --data traces.jsonl \\
        --out own.jsonl
    """
    from graft.errors import UsageError, UserError
    from mtp.data.regenerate import base_record, regenerate
    from mtp.data.render import THINKING
    from mtp.data.server import Server

    if thinking not in THINKING:
        raise UsageError("thinking 'keep' or 'strip'", repr(thinking), "fix --thinking")
    chosen = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    report = regenerate(
        Server(
            url=url,
            api_key=os.environ.get("OPENAI_API_KEY", ""),
            timeout_seconds=timeout,
            num_tries=tries,
        ),
        data,
        out,
        sampling={name: value for name, value in chosen.items() if value is not None},
        base=base_record(base) if base is not None else {},
        thinking=thinking,
        concurrency=concurrency,
        limit=limit,
        overwrite=overwrite,
    )
    print(json.dumps(report.as_dict(), indent=1) if as_json else report.as_text())
    if not (report.done or report.resumed):
        # What the server refused is not asked again, so one with wrong options spoils the log.
        raise UserError(
            "an answer to keep",
            "none, for the reasons above",
            "correct the server's options or the sources, and start anew with --overwrite",
        )


@data_app.command("stats")
def data_stats(
    data: Annotated[Path, typer.Argument(help="Folder of `mtp data prepare`.")],
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the lengths here; needs matplotlib.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lengths, categories, supervised share and tool-call share of prepared data.

    \b
    Example:
      mtp data stats data --plot lengths.png
    """
    from mtp.data.stats import as_text, plot_lengths, statistics

    result, lengths = statistics(data)
    if plot is not None:
        plot_lengths(lengths, plot)
    print(json.dumps(result, indent=1) if as_json else as_text(result))
