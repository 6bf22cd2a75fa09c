"""The deploy command of docs/dspark.md as written, and what its counters say.

    python deploy.py WORK OUT.json

`vllm serve BASE --speculative-config ...` with the draft and 7 tokens, and what a machine without
FlashAttention and FlashInfer needs besides; requests over HTTP, greedy, the prompts of `mtp eval`;
acceptance from /metrics beside what `mtp eval` predicted. If vLLM does not start so, the draft's
attention backend is named as the base's is: the report holds the command that served.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from mtp.acceptance import AcceptanceCounts
from mtp.data.prompts import evaluation_prompts
from mtp.recipe import load_recipe
from mtp.serving.probe import end_tokens

HERE = Path(__file__).parent
PORT, CONCURRENCY, SECONDS_TO_START = 8123, 16, 400
URL = f"http://127.0.0.1:{PORT}"
# Not of the command: this machine has no FlashAttention 2 and no FlashInfer, and shares its GPU.
MACHINE = ["--attention-backend", "TRITON_ATTN", "--gdn-prefill-backend", "triton",
           "--gpu-memory-utilization", "0.06", "--kv-cache-memory-bytes", str(3 << 30),
           "--max-model-len", "2048"]  # fmt: skip


def ask(body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def counters(num_steps: int) -> AcceptanceCounts:
    """vLLM's own, of all requests so far."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    drafts, positions = 0, [0] * num_steps
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:spec_decode_num_drafts_total":
                drafts += int(sample.value)
            elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                positions[int(sample.labels["position"])] += int(sample.value)
    return AcceptanceCounts(num_steps, drafts, positions)


def wait_until_ready(server: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    print(f"vllm serve is not ready; its exit status: {server.poll()}", flush=True)
    return False


def served(work: Path, command: list[str]) -> dict[str, Any] | None:
    """What a server counted, or None if it did not start."""
    settings = load_recipe(HERE / "recipe.toml")
    program = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    server = subprocess.Popen(
        [*program, *command, *MACHINE, "--port", str(PORT)], cwd=work, start_new_session=True
    )
    try:
        if not wait_until_ready(server):
            return None
        prompts = evaluation_prompts(
            work / "data", num_prompts=settings.eval.num_prompts,
            max_prompt_tokens=settings.eval.max_prompt_tokens,
        )  # fmt: skip
        common = {"model": "base", "max_tokens": settings.eval.num_tokens, "temperature": 0,
                  "stop_token_ids": end_tokens(work / "base")}  # fmt: skip
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            answers = list(pool.map(ask, [common | {"prompt": list(p.token_ids)} for p in prompts]))
        time.sleep(1)
        return {
            "schema_version": 1, "command": ["vllm", *command], "machine": MACHINE,
            "num_prompts": len(prompts),
            "served": counters(settings.dspark.num_speculative_tokens).as_dict(),
            "predicted": json.loads((work / "draft-eval.json").read_text()),
            "num_tokens": sum(answer["usage"]["completion_tokens"] for answer in answers),
        }  # fmt: skip
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def main(work: Path, out: Path) -> None:
    num_steps = load_recipe(HERE / "recipe.toml").dspark.num_speculative_tokens
    config = {"method": "dspark", "model": "draft", "num_speculative_tokens": num_steps}
    for more in ({}, {"attention_backend": "TRITON_ATTN"}):
        report = served(work, ["serve", "base", "--speculative-config", json.dumps(config | more)])
        if report:
            out.write_text(json.dumps(report, indent=1) + "\n")
            print("served", report["served"], "predicted acc-len", report["predicted"]["acc_len"])
            return
    raise SystemExit("vllm serve did not start")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
