"""vLLM's drafts on Model Runner V2 against the chain in plain torch, and negative controls.

Each case of `cases.py` runs in a process of its own under a time limit: an engine that hangs or
crashes costs one case. MTP_GPU_REPORT names a file to which each case's findings are appended.
On a CUDA machine: `python -m pytest tests/gpu -n 6`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import CASES

TIME_LIMIT = float(os.environ.get("MTP_GPU_TIME_LIMIT", "240"))


def findings(name: str, folder: Path) -> dict[str, Any]:
    """Run one case; its findings, or with `error` the end of its output."""
    command = [sys.executable, str(Path(__file__).with_name("run_case.py")), name, str(folder)]
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
        try:
            status: int | str = process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            status = f"no end within {TIME_LIMIT:.0f} s"
        finally:
            if process.poll() is None:  # with its workers
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors="replace")
    # vLLM may still log behind it.
    lines = [line for line in text.splitlines() if line.startswith('{"case": ')]
    if status == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
    else:
        found = {"case": name, "expect": CASES[name].expect, "error": f"{status}: {text[-3000:]}"}
    if report := os.environ.get("MTP_GPU_REPORT"):
        with Path(report).open("a") as file:
            file.write(json.dumps(found) + "\n")
    return found


def check(found: dict[str, Any]) -> None:
    """What is expected of the findings of a case."""
    name, case = found["case"], CASES[found["case"]]
    routed = found["speculator"] == "MultiModuleMTPSpeculator"
    assert routed == (case.sabotage != "stock")
    assert found["num_drafts"] > 60
    # In bf16 a router may choose another expert, which no logit's margin tells.
    exact = case.near_tie < 1
    few = 0 if exact else found["num_drafts"] // 50
    assert found["num_wrong_tokens"] <= (0 if exact else found["num_tokens"] // 50)
    if case.expect == "parity":
        assert found["num_wrong"] <= few
        assert found["num_ties"] <= found["num_drafts"] // (100 if exact else 20)
        # Rejections of every length.
        assert set(found["accepted"]) == {str(k) for k in range(case.num_steps + 1)}
    elif case.expect == "wrong":
        assert found["num_wrong"] > few
    if case.engine.get("max_num_batched_tokens") == 24:
        assert found["num_chunk_ends"] > 0 and len(found["batch_sizes"]) > 1
    if name == "preemption":
        assert found["num_preemptions"] > 0


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, num_gpus: int, tmp_path: Path) -> None:
    if CASES[name].num_gpus > num_gpus:
        pytest.skip(f"needs {CASES[name].num_gpus} GPUs, {num_gpus} here")
    found = findings(name, tmp_path)
    assert "error" not in found, found["error"]
    check(found)
