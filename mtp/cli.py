"""The `mtp` command: thin commands over the packages, heavy imports inside them.

Exit codes: 0 success, 1 a broken input, a refused request or a failed check, 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from graft.errors import UserError
from mtp import __version__

app = typer.Typer(
    name="mtp",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train a multi-layer MTP head for the model you serve, graft it in, prove that it runs.",
)
data_app = typer.Typer(no_args_is_help=True, help="Traces and code in, training rows out.")
nano_app = typer.Typer(no_args_is_help=True, help="The demo's small base and its training text.")
release_app = typer.Typer(no_args_is_help=True, help="A Hub-ready folder.")
app.add_typer(data_app, name="data")
app.add_typer(nano_app, name="nano")
app.add_typer(release_app, name="release")

Base = Annotated[Path, typer.Option("--base", help="The base model's folder.")]
Data = Annotated[Path, typer.Option("--data", help="Folder of `mtp data prepare`.")]
Head = Annotated[Path, typer.Option("--head", help="The head's folder.")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="TOML recipe; see recipes/.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 ...")]
Report = Annotated[Path | None, typer.Option("--report", help="Also write the JSON here.")]


class Runtime(StrEnum):
    """routed: each position on its own layer; stock: an unpatched vLLM, layer 0 repeated."""

    routed = "routed"
    stock = "stock"


def main() -> None:
    """Run the command; a user's mistake is one line on stderr and exit code 1."""
    try:
        app()
    except UserError as error:
        print(f"mtp: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("mtp: interrupted; nothing half-written was left behind", file=sys.stderr)
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mtp-graft {__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _emit(result: dict[str, Any], as_json: bool, report: Path | None, table: Any) -> None:
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 100).print(table)


@nano_app.command("traces")
def nano_traces(
    out: Annotated[Path, typer.Option("--out", help="JSONL file to write.")],
    conversations: Annotated[int, typer.Option(help="How many to record.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the agent's choices.")] = 0,
) -> None:
    """Record a scripted agent that really works on copies of standard-library modules.

    Example: mtp nano traces --out traces.jsonl
    """
    from mtp.nano.agent import record_traces

    record_traces(out, num_conversations=conversations, seed=seed)
    print(f"{out}: {conversations} conversations")


@nano_app.command("code")
def nano_code(out: Out, overwrite: Overwrite = False) -> None:
    """Copy real Python source: the standard library of the running interpreter.

    Example: mtp nano code --out code
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

    Example: mtp nano base --traces traces.jsonl --code code --out base
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


@data_app.command("prepare")
def data_prepare(
    base: Base,
    source: Annotated[list[Path], typer.Option(help="A file or folder; may be repeated.")],
    out: Out,
    max_length: Annotated[int, typer.Option(help="Longest row, in tokens.")] = 4096,
    held_out_percent: Annotated[int, typer.Option(help="Conversations kept out.")] = 5,
    max_skip: Annotated[
        float, typer.Option(help="Share of broken rows that fails the run.")
    ] = 0.01,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    thinking: Annotated[str, typer.Option(help="keep or strip, as it will be served.")] = "keep",
    allow_missing_tools: Annotated[
        bool, typer.Option("--allow-missing-tools", help="Take calls that have no tool schemas.")
    ] = False,
    licence: Annotated[
        str, typer.Option(help="Licence of rows that record none; reaches the model card.")
    ] = "unknown",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Render conversations and code with the base's tokenizer, and mask what is supervised.

    Example: mtp data prepare --base base --source traces.jsonl --source src/ --out data
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
        overwrite=overwrite,
    )
    if as_json:
        for row in report.broken[:5]:
            print(f"mtp: skipped {row}", file=sys.stderr)
    print(json.dumps(report.as_dict(), indent=1) if as_json else report.as_text())


@app.command("train")
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
    _emit(summary, as_json, None, acceptance_table(rows, title))


@app.command("eval")
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
    _emit(metrics, as_json, report, acceptance_table(rows, f"{head}, predicted, {runtime.value}"))


@app.command("quantize")
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
    _emit(result, as_json, report, acceptance_table(rows, title))


@app.command("probe")
def probe_command(
    checkpoint: Annotated[
        list[str], typer.Option(help="LABEL=FOLDER of a grafted checkpoint; may be repeated.")
    ],
    data: Data,
    vllm_python: Annotated[
        Path, typer.Option(help="Python of an environment that has vLLM and mtp-graft.")
    ] = Path(sys.executable),
    predicted: Annotated[
        list[str] | None, typer.Option(help="LABEL=REPORT of `mtp eval` or `mtp quantize`.")
    ] = None,
    recipe: RecipeFile = None,
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Serve grafted checkpoints in vLLM, stock and routed, and read its own counters.

    Example: mtp probe --checkpoint BF16=grafted --data data --predicted BF16=eval.json
    """
    from mtp.recipe import load_recipe
    from mtp.serving.compare import compare_runtimes, table_rows
    from mtp.tables import acceptance_table

    result = compare_runtimes(
        dict(_labelled(checkpoint)), _labelled(predicted or []), data, load_recipe(recipe).eval,
        vllm_python=vllm_python,
    )  # fmt: skip
    title = f"vLLM {result['vllm_version']}, greedy; cumulative acceptance"
    _emit(result, as_json, report, acceptance_table(table_rows(result), title))


def _labelled(items: list[str]) -> list[tuple[str, Path]]:
    pairs = [item.partition("=") for item in items]
    wrong = [item for item, (label, _, path) in zip(items, pairs, strict=True) if not path]
    if wrong:
        raise typer.BadParameter(f"expected LABEL=PATH, found {', '.join(wrong)}")
    return [(label, Path(path)) for label, _, path in pairs]


@app.command("graft")
def graft_command(
    base: Base,
    out: Out,
    head: Head = Path("head"),
    allow_mismatch: Annotated[
        bool, typer.Option("--allow-mismatch", help="Graft a head trained on another base.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a new checkpoint: the base's shards untouched, and the head in one more.

    Example: mtp graft --base base --head head-nvfp4 --out grafted
    """
    from graft.plan import plan_graft
    from graft.writer import write_graft

    plan = plan_graft(base, head, out=out, allow_mismatch=allow_mismatch)
    result = write_graft(plan, out, overwrite=overwrite, tool=f"mtp-graft {__version__}")
    print(json.dumps(result.as_dict(), indent=1) if as_json else result.as_text())


@app.command("verify")
def verify_command(
    checkpoint: Annotated[Path, typer.Argument(help="The grafted folder.")],
    base: Annotated[Path | None, typer.Option("--base", help="The base it was made from.")] = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Also measure which layers a real vLLM runs.")
    ] = False,
    vllm_python: Annotated[
        Path, typer.Option(help="Python of the environment that has vLLM.")
    ] = Path(sys.executable),
    data: Annotated[
        Path | None, typer.Option("--data", help="Prompts for --vllm; a few texts without it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reopen a grafted checkpoint and prove it: base bytes, head, scales, index, config.

    With --vllm, also serve it and a twin whose later layers are scrambled, and compare. Exit code
    1 if a check failed or the layers are not routed.

    Example: mtp verify grafted --base base --vllm --vllm-python .venv-vllm/bin/python
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
        proof = prove_routing(checkpoint, prompts, vllm_python=vllm_python)
        result["proof"], proven = proof.as_dict(), proof.verdict == "routed"
        if not as_json:
            print(proof.as_text())
    elif vllm:
        print("mtp: vLLM was not started, since a check failed", file=sys.stderr)
    if as_json:
        print(json.dumps(result, indent=1))
    if not (report.ok and proven):
        raise typer.Exit(1)


@release_app.command("build")
def release_build(
    checkpoint: Annotated[Path, typer.Option(help="A grafted checkpoint.")],
    out: Out,
    name: Annotated[str, typer.Option(help="The model's name, as in the serve command.")],
    license_id: Annotated[str, typer.Option("--license", help="The Hub's licence identifier.")],
    license_file: Annotated[Path, typer.Option(help="Becomes LICENSE.")],
    evaluation: Annotated[
        Path | None, typer.Option(help="Report of `mtp eval` or `mtp quantize`.")
    ] = None,
    served: Annotated[Path | None, typer.Option(help="Report of `mtp probe`.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the base.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Assemble a Hub-ready folder with a model card. Nothing is uploaded.

    Example: mtp release build --checkpoint grafted --out release --name me/model \
    --license mit --license-file LICENSE --evaluation eval.json
    """
    from mtp.release.assemble import build_release

    files = build_release(
        checkpoint,
        out,
        name=name,
        license_id=license_id,
        license_file=license_file,
        evaluation=evaluation,
        served=served,
        base_model=base_model,
        overwrite=overwrite,
    )
    print(f"{out}: {len(files)} files; look at {out / 'README.md'} before you upload it")


if __name__ == "__main__":
    main()
