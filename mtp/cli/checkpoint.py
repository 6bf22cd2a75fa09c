"""`mtp graft`, `mtp verify`, `mtp probe`: the grafted checkpoint, proven and measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from mtp import __version__
from mtp.cli.options import (
    AsJson,
    Base,
    Data,
    EngineOptions,
    Head,
    LinkKind,
    Out,
    Overwrite,
    RecipeFile,
    Report,
    emit,
    parse_engine_options,
    parse_size,
)  # fmt: skip


def graft_command(
    base: Base,
    out: Out,
    head: Head = Path("head"),
    allow_mismatch: Annotated[
        bool, typer.Option("--allow-mismatch", help="Graft a head trained on another base.")
    ] = False,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Leave the vision tower out.")
    ] = False,
    link: Annotated[
        LinkKind, typer.Option(help="How untouched shards are placed; auto: hard, reflink, copy.")
    ] = LinkKind.auto,
    head_shard_size: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="Largest shard of the head.")
    ] = "5GB",  # type: ignore[assignment]
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a new checkpoint: the base's shards untouched, and the head in one more.

    \b
    Example:
      mtp graft --base base --head head-nvfp4 --out grafted
    """
    from graft.plan import plan_graft
    from graft.plan_report import report_plan
    from graft.writer import write_graft

    plan = plan_graft(
        base, head, out=out, overwrite=overwrite, allow_mismatch=allow_mismatch,
        text_only=text_only, head_shard_bytes=head_shard_size,
    )  # fmt: skip
    tool = f"mtp-graft {__version__}"
    result = (
        report_plan(plan, out, link.value)
        if dry_run
        else write_graft(plan, out, overwrite=overwrite, link=link.value, tool=tool)
    )
    print(json.dumps(result.as_dict(), indent=1) if as_json else result.as_text())


def verify_command(
    checkpoint: Annotated[Path, typer.Argument(help="The grafted folder.")],
    base: Annotated[Path | None, typer.Option("--base", help="The base it was made from.")] = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Also measure which layers a real vLLM runs.")
    ] = False,
    vllm_python: Annotated[
        Path, typer.Option(help="Python of the environment that has vLLM.", show_default="this one")
    ] = Path(sys.executable),
    data: Annotated[
        Path | None, typer.Option("--data", help="Prompts for --vllm; a few texts without it.")
    ] = None,
    engine_options: EngineOptions = None,
    as_json: AsJson = False,
) -> None:
    """Reopen a grafted checkpoint and prove it: base bytes, head, scales, index, config.

    With --vllm, also serve it and a twin whose later layers are scrambled, and compare. Exit code
    1 if a check failed or the layers are not routed.

    \b
    Example:
      mtp verify grafted --base base --vllm \\
        --vllm-python .venv-vllm/bin/python
    """
    from graft.verify import verify_graft
    from mtp.serving.routing import routing_in_words

    report = verify_graft(checkpoint, base)
    result = {**report.as_dict(), "routing": routing_in_words()}
    if not as_json:
        print(report.as_text())
        print(result["routing"])
    proven = True
    if vllm and report.ok:
        from mtp.serving.proof_prompts import proof_prompts
        from mtp.serving.routing_proof import prove_routing

        prompts = proof_prompts(checkpoint, data)
        proof = prove_routing(
            checkpoint, prompts, vllm_python=vllm_python,
            engine_options=parse_engine_options(engine_options),
        )  # fmt: skip
        result["proof"], proven = proof.as_dict(), proof.verdict == "routed"
        if not as_json:
            print(proof.as_text())
    elif vllm:
        print("mtp: vLLM was not started, since a check failed", file=sys.stderr)
    if as_json:
        print(json.dumps(result, indent=1))
    if not (report.ok and proven):
        raise typer.Exit(1)


def probe_command(
    checkpoint: Annotated[
        list[str], typer.Option(help="LABEL=FOLDER of a grafted checkpoint; may be repeated.")
    ],
    data: Data,
    vllm_python: Annotated[
        Path,
        typer.Option(
            help="Python of an environment that has vLLM and mtp-graft.", show_default="this one"
        ),
    ] = Path(sys.executable),
    predicted: Annotated[
        list[str] | None, typer.Option(help="LABEL=REPORT of `mtp eval` or `mtp quantize`.")
    ] = None,
    recipe: RecipeFile = None,
    engine_options: EngineOptions = None,
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Serve grafted checkpoints in vLLM, stock and routed, and read its own counters.

    \b
    Example:
      mtp probe --checkpoint BF16=grafted --data data \\
        --predicted BF16=eval.json
    """
    from mtp.recipe import load_recipe
    from mtp.serving.compare import compare_runtimes, table_rows
    from mtp.tables import acceptance_table

    checkpoints = dict(_labelled(checkpoint))
    if len(checkpoints) < len(checkpoint):
        raise typer.BadParameter("each --checkpoint needs a label of its own")
    result = compare_runtimes(
        checkpoints, _labelled(predicted or []), data, load_recipe(recipe).eval,
        vllm_python=vllm_python, engine_options=parse_engine_options(engine_options),
    )  # fmt: skip
    title = f"vLLM {result['vllm_version']}, greedy; cumulative acceptance"
    emit(result, as_json, report, acceptance_table(table_rows(result), title))


def _labelled(items: list[str]) -> list[tuple[str, Path]]:
    """LABEL=PATH items as pairs."""
    pairs = [item.partition("=") for item in items]
    wrong = [item for item, (label, _, path) in zip(items, pairs, strict=True) if not path]
    if wrong:
        raise typer.BadParameter(f"expected LABEL=PATH, found {', '.join(wrong)}")
    return [(label, Path(path)) for label, _, path in pairs]
