"""The draft and the MTP head on the same base and prompts, one engine after the other.

    python table.py WORK OUT    # WORK as train.sh leaves it; writes OUT.json and OUT.md

Each variant has the GPU to itself, and its own process (`routing_h200/worker.py`) with a KV cache
of the same fixed size, so what the device holds more than `plain` is weights and buffers of the
draft.
Acceptance is vLLM's own counters over all prompts, greedy; predicted is what `mtp eval` and
`mtp quantize` said before. Speed: all prompts at a concurrency, the median of three passes.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

from mtp.acceptance import AcceptanceCounts
from mtp.data.prompts import evaluation_prompts
from mtp.recipe import load_recipe
from mtp.serving.probe import end_tokens

HERE = Path(__file__).parent
WORKER = HERE.parent / "routing_h200" / "worker.py"
NUM_HEAD_STEPS = 4
CONCURRENCIES, PASSES = (1, 16, 64), 3
SECONDS_TO_START = 600
COLUMNS = ("acc-rate", "acc-len", "predicted acc-len", *(f"tok/s at {n}" for n in CONCURRENCIES),
           "GiB more than plain", "same text as plain")  # fmt: skip


def variants(work: Path, num_tokens: int) -> dict[str, dict[str, Any]]:
    """What each worker serves; the reference's deploy command is `dspark`."""
    draft = {"method": "dspark", "model": str(work / "draft"), "attention_backend": "TRITON_ATTN"}
    plans: dict[str, tuple[str, int, dict[str, Any], str]] = {
        "plain": ("base", 0, {}, "off"),
        "MTP stock": ("grafted", NUM_HEAD_STEPS, {}, "off"),
        "MTP routed": ("grafted", NUM_HEAD_STEPS, {}, "on"),
        "dspark": ("base", num_tokens, draft, "off"),
    }
    engine = {
        "max_model_len": 1100, "max_num_seqs": 64, "enable_prefix_caching": False,
        "attention_backend": "TRITON_ATTN", "gdn_prefill_backend": "triton",
        "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 3 << 30,
        "kernel_config": {"enable_jit_warmup": False},
    }  # fmt: skip
    return {
        name: {
            "checkpoint": str(work / folder), "num_speculative_tokens": steps, "engine": engine,
            "speculative": speculative, "routing": routing,
        }
        for name, (folder, steps, speculative, routing) in plans.items()
    }  # fmt: skip


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(spec: dict[str, Any], folder: Path, requests: dict[str, Any]) -> dict[str, Any]:
    """Start a worker, ask it, stop it."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in ("ready.json", "failed.txt", "socket"):
        (folder / stale).unlink(missing_ok=True)
    (folder / "spec.json").write_text(json.dumps(spec))
    environment = os.environ | {
        "MTP_GRAFT_ROUTING": spec["routing"], "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # fmt: skip
    before, started = used_bytes(), time.monotonic()
    with (folder / "log.txt").open("w") as log:
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)], stdout=log, stderr=log,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            while not (folder / "ready.json").exists():
                if worker.poll() is not None or time.monotonic() - started > SECONDS_TO_START:
                    raise SystemExit(f"{folder}: no engine, see log.txt")
                time.sleep(0.5)
            detailed = ask(folder, requests | {"concurrency": 64, "detailed": True})
            speeds = {}
            for concurrency in CONCURRENCIES:
                part = requests | {"concurrency": concurrency}
                if concurrency == 1:
                    part = part | {"prompts": requests["prompts"][:8]}
                passes = [ask(folder, part) for _ in range(PASSES)]
                speeds[concurrency] = statistics.median(
                    one["num_tokens"] / one["seconds"] for one in passes
                )
            return {
                "counters": detailed.get("counters"), "outputs": detailed["outputs"],
                "tokens_per_second": speeds, "bytes": used_bytes() - before,
            }  # fmt: skip
        finally:
            os.killpg(worker.pid, signal.SIGKILL)  # with its engine's process
            worker.wait()
            time.sleep(5)  # until the driver has its memory back


def ask(folder: Path, request: dict[str, Any]) -> Any:
    with Client(str(folder / "socket"), "AF_UNIX") as connection:
        connection.send(request)
        return connection.recv()


def acceptance(counters: Any, num_steps: int) -> dict[str, Any]:
    """vLLM's counters, as `mtp eval` names what comes of them."""
    counts = AcceptanceCounts(num_steps, counters["num_drafts"], counters["accepted_per_position"])
    return counts.as_dict()


def predictions(work: Path) -> dict[str, float]:
    found = {}
    if (work / "draft-eval.json").is_file():
        found["dspark"] = json.loads((work / "draft-eval.json").read_text())["acc_len"]
    if (work / "quantize.json").is_file():
        found["MTP routed"] = json.loads((work / "quantize.json").read_text())["before"]["acc_len"]
    return found


def markdown(rows: dict[str, list[str]]) -> str:
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(row)} |" for name, row in rows.items())])


def main(work: Path, out: Path) -> None:
    settings = load_recipe(HERE / "recipe.toml")
    prompts = evaluation_prompts(
        work / "data", num_prompts=settings.eval.num_prompts,
        max_prompt_tokens=settings.eval.max_prompt_tokens,
    )  # fmt: skip
    requests = {
        "prompts": [list(prompt.token_ids) for prompt in prompts],
        "max_tokens": settings.eval.num_tokens, "end_tokens": end_tokens(work / "base"),
    }  # fmt: skip
    report: dict[str, Any] = {
        "schema_version": 1, "vllm_version": version("vllm"),
        "hardware": torch.cuda.get_device_name(), "num_prompts": len(prompts), "variants": {},
    }  # fmt: skip
    rows = {}
    for name, spec in variants(work, settings.dspark.num_speculative_tokens).items():
        while name == "dspark" and not (work / "draft-eval.json").is_file():
            time.sleep(1)  # the other variants don't need the draft
        found = measure(spec, out.parent / f"{out.name}-{name.replace(' ', '-')}", requests)
        report["variants"][name] = found
        plain = report["variants"]["plain"]
        same = sum(a == b for a, b in zip(found["outputs"], plain["outputs"], strict=True))
        accepted = ["", "", ""]
        if spec["num_speculative_tokens"]:
            metrics = acceptance(found["counters"], spec["num_speculative_tokens"])
            found["acceptance"] = metrics
            predicted = predictions(work)
            guess = f"{predicted[name]:.3f}" if name in predicted else ""
            accepted = [f"{metrics['acc_rate']:.3f}", f"{metrics['acc_len']:.3f}", guess]
        rows[name] = [
            *accepted, *(f"{found['tokens_per_second'][n]:.0f}" for n in CONCURRENCIES),
            f"{(found['bytes'] - plain['bytes']) / 2**30:.2f}", f"{same} of {len(prompts)}",
        ]  # fmt: skip
        if name == "dspark":
            report["dspark"] = found["acceptance"]
        out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(rows) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
