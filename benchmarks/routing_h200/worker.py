"""One vLLM engine that measures on request: `python worker.py FOLDER`.

FOLDER/spec.json says what to serve; requests come over FOLDER/socket, and the worker sleeps between
them. An engine a process, several on one GPU and idle but for the one that is asked: so rounds of
different variants can alternate within a second, which no restart could give.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from mtp.serving.probe import _counters, _difference


def generate(
    llm: Any,
    prompts: list[list[int]],
    concurrency: int,
    max_tokens: int,
    end_tokens: list[int] | None = None,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Keep `concurrency` requests in flight until all prompts are done.

    Returns seconds in all, seconds of each engine step, and for each prompt the number of tokens
    that each of its steps gave: with speculation, one more than were accepted.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, ignore_eos=end_tokens is None,
        detokenize=False, stop_token_ids=end_tokens or [], output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    engine, waiting = llm.llm_engine, list(enumerate(prompts))
    outputs: list[list[int]] = [[] for _ in prompts]
    increments: list[list[int]] = [[] for _ in prompts]
    in_flight, serial, steps = 0, str(time.monotonic_ns()), []
    started = last = time.perf_counter()
    while waiting or in_flight:
        while waiting and in_flight < concurrency:
            index, prompt = waiting.pop(0)
            engine.add_request(f"{serial}-{index}", {"prompt_token_ids": prompt}, sampling)
            in_flight += 1
        for output in engine.step():
            index = int(output.request_id.split("-")[1])
            if new := list(output.outputs[0].token_ids):
                outputs[index] += new
                increments[index].append(len(new))
            in_flight -= output.finished
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    return {
        "seconds": last - started, "step_seconds": steps, "outputs": outputs,
        "increments": increments,
    }  # fmt: skip


def start(spec: dict[str, Any]) -> Any:
    """The engine of a spec."""
    from vllm import LLM

    num_steps = spec["num_speculative_tokens"] or 0
    arguments = dict(spec["engine"])
    if num_steps:
        arguments["speculative_config"] = {
            "method": "mtp", "num_speculative_tokens": num_steps, **spec.get("speculative", {}),
        }  # fmt: skip
    return LLM(spec["checkpoint"], skip_tokenizer_init=True, disable_log_stats=False, **arguments)


def reserved_bytes(_: Any) -> int:
    """What torch has reserved on the device, in a worker of the engine."""
    import torch

    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def main(folder: Path) -> None:
    spec = json.loads((folder / "spec.json").read_text())
    started = time.perf_counter()
    llm, num_steps = start(spec), spec["num_speculative_tokens"] or 0
    ready = {"seconds_to_start": time.perf_counter() - started}
    if spec.get("memory"):
        ready["reserved_bytes"] = sum(llm.collective_rpc(reserved_bytes))
    gc.collect()
    gc.freeze()
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        (folder / "ready.json").write_text(json.dumps(ready))
        while True:
            with listener.accept() as connection:
                request = connection.recv()
                detailed = request.pop("detailed", False)
                before = _counters(llm, num_steps) if detailed else None
                gc.disable()
                result = generate(llm, **request)
                gc.enable()
                result["num_tokens"] = sum(map(len, result["outputs"]))
                result["num_drafts"] = sum(len(i) - 1 for i in result["increments"])
                result["median_step"] = statistics.median(result["step_seconds"])
                result["num_steps"] = len(result.pop("step_seconds"))
                if detailed:
                    time.sleep(0.1)  # the counters arrive with the engine's next message
                    result |= {"counters": _difference(_counters(llm, num_steps), before)}
                else:
                    del result["outputs"], result["increments"]
                connection.send(result)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        (Path(sys.argv[1]) / "failed.txt").write_text(traceback.format_exc())
        raise
