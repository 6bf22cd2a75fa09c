"""Run prompts through a real vLLM, greedily, and read its own speculation counters.

Runs inside vLLM's environment, as `python -m mtp.serving.probe REQUEST.json RESULT.json`; other
environments call `probe_client.run_probe`. A request holds several runs, which share one process:
importing vLLM and looking at the model classes takes longer than starting a small engine. Each
run has a fresh engine, and the routing plugin decides per engine, so runs do not touch each other
(tests/vllm proves it with layers full of NaN).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
COUNTERS = {
    "num_drafts": "vllm:spec_decode_num_drafts",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
# In one process, so that engines can follow one another. A small cache, since the CPU default of
# 4 GiB is allocated and touched at every start. Threads that wait asleep and unbound: bound ones
# that spin took 13 s instead of 1 s on two cores that had other work.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def probe(
    checkpoint: Path,
    prompts: list[list[int]],
    *,
    num_speculative_tokens: int | None,
    max_tokens: int,
    routing: bool | None = True,
    dtype: str = "bfloat16",
    ignore_eos: bool = False,
    engine_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Serve `prompts` with one fresh engine and measure it.

    Args:
        checkpoint: a grafted checkpoint, or any model when nothing is speculated.
        prompts: token ids.
        num_speculative_tokens: K; None runs without speculation.
        max_tokens: tokens generated for each prompt, fewer after an end token.
        routing: MTP_GRAFT_ROUTING for this engine, on or off; None leaves it as it is.
        dtype: vLLM's dtype.
        ignore_eos: generate on after end tokens.
        engine_options: more keyword arguments of `vllm.LLM`; they win.

    Returns:
        `outputs` (token ids of each prompt), `routed_layers` (0: vLLM as it is), times in
        seconds, and the counters with their per-position list (empty without speculation).
    """
    from vllm import LLM, SamplingParams

    from mtp.serving.vllm_plugin import SWITCH, num_routed_layers

    num_steps = num_speculative_tokens or 0
    started = time.perf_counter()
    before = os.environ.get(SWITCH)
    if routing is not None:
        os.environ[SWITCH] = "on" if routing else "off"
    try:
        llm = LLM(**_engine_arguments(checkpoint, prompts, num_steps, max_tokens, dtype)
                  | (engine_options or {}))  # fmt: skip
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before
    ready = time.perf_counter()
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=[] if ignore_eos else end_tokens(checkpoint),
        detokenize=False,
    )
    counters_before = _counters(llm, num_steps)
    outputs = llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False
    )
    done = time.perf_counter()
    counters = _difference(_counters(llm, num_steps), counters_before)
    result = {
        "routed_layers": num_routed_layers(llm.llm_engine.vllm_config),
        "num_speculative_tokens": num_speculative_tokens,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds_to_start": ready - started,
        "seconds_to_generate": done - ready,
        **counters,
    }
    del llm
    _release()
    return result


def end_tokens(checkpoint: Path) -> list[int]:
    """End-of-text ids of a checkpoint; the generation config has the last word, as in vLLM."""
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        config = json.loads(path.read_text()) if path.is_file() else {}
        found = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if found is not None:
            return list(found) if isinstance(found, list) else [found]
    return []


def _engine_arguments(
    checkpoint: Path, prompts: list[list[int]], num_steps: int, max_tokens: int, dtype: str
) -> dict[str, Any]:
    from vllm.platforms import current_platform

    # Drafting stops where a window would pass the model length, hence the slack.
    longest = max(map(len, prompts)) + max_tokens + 2 * num_steps + 2
    arguments: dict[str, Any] = {
        "model": str(checkpoint),
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "max_model_len": longest,
        "max_num_seqs": min(len(prompts), 64),
    }
    if num_steps:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_steps}
    if current_platform.is_cpu():
        arguments |= {"enforce_eager": True, "max_num_batched_tokens": max(2048, longest)}
    return arguments


def _counters(llm: Any, num_steps: int) -> dict[str, Any]:
    """The speculation counters of this engine; zeros before its first draft."""
    values = {metric.name: metric for metric in llm.get_metrics()}
    counters: dict[str, Any] = {
        key: int(values[name].value) if name in values else 0 for key, name in COUNTERS.items()
    }
    per_position = list(values[PER_POSITION].values) if PER_POSITION in values else []
    padding = [0] * (num_steps - len(per_position))
    counters["accepted_per_position"] = [*map(int, per_position[:num_steps]), *padding]
    return counters


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    difference: dict[str, Any] = {key: after[key] - before[key] for key in COUNTERS}
    pairs = zip(after["accepted_per_position"], before["accepted_per_position"], strict=True)
    difference["accepted_per_position"] = [now - then for now, then in pairs]
    return difference


def _release() -> None:
    """Free this engine's caches and groups, so that the next one starts as in a new process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def use_environment(environment: MutableMapping[str, str]) -> None:
    """Set ENVIRONMENT where nothing else is set; OMP_* only counts before torch is imported."""
    for name, value in ENVIRONMENT.items():
        environment.setdefault(name, value)


def main(request_path: str, result_path: str) -> None:
    """Do all runs of a request file; the result is written after each one."""
    use_environment(os.environ)
    request = json.loads(Path(request_path).read_text())
    if request.get("schema_version") != SCHEMA_VERSION:
        sys.exit(f"expected a request of schema_version {SCHEMA_VERSION}")
    import vllm

    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION, "vllm_version": vllm.__version__, "runs": [],
    }  # fmt: skip
    for run in request["runs"]:
        arguments = {key: value for key, value in run.items() if key != "name"}
        arguments["checkpoint"] = Path(arguments["checkpoint"])
        measured = probe(**arguments)
        result["runs"].append({"name": run["name"], "checkpoint": run["checkpoint"], **measured})
        temporary = Path(f"{result_path}.part")
        temporary.write_text(json.dumps(result))
        temporary.replace(result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
