"""One vLLM engine that measures on request: `python worker.py FOLDER`.

FOLDER/spec.json says what to serve. Each FOLDER/request-N.json is answered by result-N.json. An
engine a process, all on one GPU and idle but for the one that is asked: so rounds of different
variants can alternate within seconds, which no restart could give.
"""

import itertools
import json
import sys
import time
import traceback
from pathlib import Path

from mtp.serving.probe import _counters, _difference


def generate(llm, prompts, concurrency, max_tokens, ignore_eos, end_tokens):
    """Keep `concurrency` requests in flight until all prompts are done."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False,
        stop_token_ids=[] if ignore_eos else end_tokens,
    )  # fmt: skip
    engine, waiting, outputs = llm.llm_engine, list(enumerate(prompts)), {}
    in_flight, serial = 0, str(time.monotonic_ns())
    started = time.perf_counter()
    while waiting or in_flight:
        while waiting and in_flight < concurrency:
            index, prompt = waiting.pop(0)
            engine.add_request(f"{serial}-{index}", {"prompt_token_ids": prompt}, sampling)
            in_flight += 1
        for output in engine.step():
            if output.finished:
                in_flight -= 1
                index = int(output.request_id.split("-")[1])
                outputs[index] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - started
    return seconds, [outputs[index] for index in range(len(prompts))]


def main(folder: Path) -> None:
    spec = json.loads((folder / "spec.json").read_text())
    from vllm import LLM

    num_steps = spec["num_speculative_tokens"] or 0
    arguments = dict(spec["engine"])
    if num_steps:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_steps}
    started = time.perf_counter()
    llm = LLM(spec["checkpoint"], skip_tokenizer_init=True, disable_log_stats=False, **arguments)
    ready = {"seconds_to_start": time.perf_counter() - started}
    (folder / "ready.json").write_text(json.dumps(ready))
    for number in itertools.count():
        request_path = folder / f"request-{number}.json"
        while not request_path.exists():
            time.sleep(0.01)
        time.sleep(0.02)
        request = json.loads(request_path.read_text())
        before = _counters(llm, num_steps)
        seconds, outputs = generate(llm, **request)
        time.sleep(0.1)  # the counters arrive with the engine's next message
        counters = _difference(_counters(llm, num_steps), before)
        result = {"seconds": seconds, "num_tokens": sum(map(len, outputs)), **counters}
        if not request["ignore_eos"]:
            result["outputs"] = outputs
        part = folder / "result.part"
        part.write_text(json.dumps(result))
        part.rename(folder / f"result-{number}.json")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        (Path(sys.argv[1]) / "failed.txt").write_text(traceback.format_exc())
        raise
