"""`mtp probe`: the same prompts through vLLM without speculation, stock and routed.

Also counts the requests whose tokens speculation left unchanged (`same_tokens`): under greedy
decoding all of them on a CPU. On a GPU two plain runs differ by themselves where bf16 logits nearly
tie, so it is counted and not required; tests/vllm requires it on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graft.errors import UserError
from graft.layout import count_head_layers
from graft.manifest import MANIFEST_NAME, read_manifest
from graft.reader import Checkpoint
from mtp.data.prompts import evaluation_prompts
from mtp.recipe import EvalRecipe, trained_for
from mtp.reports import read_report
from mtp.serving.probe_client import run_probe

SCHEMA_VERSION = 1


def compare_runtimes(
    checkpoints: dict[str, Path],
    predictions: list[tuple[str, Path]],
    data: Path,
    recipe: EvalRecipe,
    *,
    vllm_python: Path,
    engine_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Serve each checkpoint stock and routed (one layer: stock), on the prompts of `mtp eval`.

    Args:
        checkpoints: label -> grafted checkpoint. The first one is also served without
            speculation; all must share their base.
        predictions: labels with reports of `mtp eval` or `mtp quantize` (its "after").
        data: folder of `mtp data prepare`.
        recipe: prompts and tokens.
        vllm_python: interpreter of the environment with vLLM and the plugin.
        engine_options: more keyword arguments of `vllm.LLM`.

    Returns:
        {"rows": [metrics with label, runtime, same_tokens], "vllm_version", "plain"}.

    Raises:
        UserError: a checkpoint without a head, vLLM that fails, or a run that was to be routed
            and was not.
    """
    prompts = evaluation_prompts(
        data, num_prompts=recipe.num_prompts, max_prompt_tokens=recipe.max_prompt_tokens
    )
    predicted = _read_predictions(predictions, list(checkpoints))
    common = {
        "prompts": [list(prompt.token_ids) for prompt in prompts],
        "max_tokens": recipe.num_tokens,
        "engine_options": engine_options,
    }
    measured = run_probe(vllm_python, _runs(checkpoints, common))
    by_name = {run["name"]: run for run in measured["runs"]}
    plain = by_name.pop("plain")
    outputs = plain.pop("outputs")
    rows = []
    for name, run in by_name.items():
        label, _, runtime = name.rpartition("/")
        if runtime == "routed" and run["routed_layers"] < 2:
            raise UserError(
                "the routing plugin to be active in vLLM",
                f"{name}: layer 0 at every position (vLLM {measured['vllm_version']})",
                f"pip install --no-deps . in a clone of mtp-graft, with {vllm_python}'s pip",
            )
        same = sum(a == b for a, b in zip(run.pop("outputs"), outputs, strict=True))
        rows.append({**run, "label": f"{label} {runtime}", "runtime": runtime, "same_tokens": same})
    return {
        "schema_version": SCHEMA_VERSION,
        "vllm_version": measured["vllm_version"],
        "num_prompts": len(prompts),
        "num_tokens": recipe.num_tokens,
        "plain": plain,
        "rows": _in_order(rows, predicted, list(checkpoints)),
    }


def _read_predictions(
    predictions: list[tuple[str, Path]], labels: list[str]
) -> list[dict[str, Any]]:
    """Rows of the table from reports, each under the label of a checkpoint."""
    rows = []
    for label, path in predictions:
        if label not in labels:
            raise UserError(
                f"predictions for {', '.join(labels)}",
                f"one for {label!r} ({path})",
                "give it the label of a --checkpoint",
            )
        report = read_report(path, "after", "runtime")
        metrics = report.get("after", report)
        name = f"{label} {metrics['runtime']}, predicted"
        rows.append({**metrics, "label": name, "predicted": True})
    return rows


def _runs(checkpoints: dict[str, Path], common: dict[str, Any]) -> list[dict[str, Any]]:
    first = next(iter(checkpoints.values()))
    runs = [{"name": "plain", "checkpoint": first, "num_speculative_tokens": None, **common}]
    for label, folder in checkpoints.items():
        num_layers = count_head_layers(Checkpoint(folder).names)
        if not num_layers:
            raise UserError(f"a grafted checkpoint at {folder}", "no mtp.* tensors", "graft a head")
        own = read_manifest(folder)["head"] if (folder / MANIFEST_NAME).exists() else {}
        num_tokens, _ = trained_for(own.get("provenance", {}), num_layers)
        runs += [
            {
                "name": f"{label}/{runtime}",
                "checkpoint": folder,
                "num_speculative_tokens": num_tokens,
                "routing": runtime == "routed",
                **common,
            }
            for runtime in ("stock", "routed")[: min(num_layers, 2)]  # one layer: nothing to route
        ]
    return runs


def _in_order(
    rows: list[dict[str, Any]], predicted: list[dict[str, Any]], labels: list[str]
) -> list[dict[str, Any]]:
    """Each label's stock and routed runs, and behind each what was predicted for it."""
    wanted = [f"{label} {runtime}" for label in labels for runtime in ("stock", "routed")]
    return [
        row
        for name in wanted
        for row in rows + predicted
        if row["label"] in (name, f"{name}, predicted")
    ]


def table_rows(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Rows for `mtp.tables.acceptance_table`."""
    return [(row["label"], row) for row in result["rows"]]
