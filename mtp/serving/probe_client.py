"""Ask a vLLM in another environment for measurements, through `mtp.serving.probe`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from graft.errors import UserError
from mtp.progress import track
from mtp.serving.probe import SCHEMA_VERSION, use_environment

EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")
RANK = re.compile(r"^\[rank\d+\]:")
MESSAGE_LENGTH = 600
# What an environment may lack, and what brings it.
MISSING = {
    "No module named 'vllm'": "name the Python of vLLM's environment (--vllm-python), or make one "
    "with `make vllm-env`",
    "No module named 'mtp'": "pip install --no-deps . in a clone of mtp-graft, with its pip",
}


def run_probe(
    python: Path, runs: list[dict[str, Any]], *, timeout_seconds: float = 3600
) -> dict[str, Any]:
    """Measure `runs` one after the other in one process of `python`, an environment with vLLM.

    Args:
        python: the interpreter; mtp-graft is installed there too, so that its plugin is found.
        runs: keyword arguments of `probe.probe`, with a `name` each; paths may be `Path`.
        timeout_seconds: for all runs together.

    Returns:
        The probe's result; each run also holds the metrics of `AcceptanceCounts.as_dict`
        (`cumulative`, `conditional`, `mean_accepted`, `acc_len`) when it speculated.

    Raises:
        UserError: no such interpreter, or the engine failed: with the end of its log.
    """
    # A file first, then a name on PATH, as a shell's `./python` and `python`.
    found = shutil.which(str(Path(python).absolute())) or shutil.which(str(python))
    if found is None:
        raise UserError(
            "a Python interpreter with vLLM", f"no {python} that can be run", "run `make vllm-env`"
        )
    with tempfile.TemporaryDirectory(prefix="mtp-probe-") as scratch:
        folder = Path(scratch)
        request, result, log = folder / "request.json", folder / "result.json", folder / "log.txt"
        # vLLM runs in another folder: paths must not depend on this one.
        placed = [{**run, "checkpoint": Path(run["checkpoint"]).absolute()} for run in runs]
        content = {"schema_version": SCHEMA_VERSION, "runs": placed}
        request.write_text(json.dumps(content, default=str))
        # Not resolved: a virtual environment's python is a link.
        command = [
            str(Path(found).absolute()),
            "-m",
            "mtp.serving.probe",
            str(request),
            str(result),
        ]
        # Not in the caller's folder: a package there would win over the installed one.
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=_environment()
            )
            try:
                _wait(process, result, [run["name"] for run in runs], timeout_seconds)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if process.returncode != 0 or not result.is_file():
            complaint = _last_complaint(log)
            lacking = [advice for name, advice in MISSING.items() if name in complaint]
            raise UserError(
                f"vLLM in {python} to finish {len(runs)} runs",
                f"exit status {process.returncode}: {complaint}",
                lacking[0]
                if lacking
                else f"correct what it names (whole log: {_keep(log)}), or "
                "build a known environment with `make vllm-env`",
            )
        measured: dict[str, Any] = json.loads(result.read_text())
    for run in measured["runs"]:
        _add_metrics(run)
    return measured


def _environment() -> dict[str, str]:
    """The caller's environment without what would make vLLM import the caller's packages."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    use_environment(kept)
    return kept


def _wait(process: Any, result: Path, names: list[str], timeout_seconds: float) -> None:
    """Wait for the process, moving a progress bar when a run has been written."""
    deadline = time.monotonic() + timeout_seconds
    for number, _ in enumerate(track(names, "vLLM runs"), start=1):
        while process.poll() is None and _num_finished(result) < number:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{len(names)} vLLM runs within {timeout_seconds:.0f} s",
                    f"run {number} ({names[number - 1]}) unfinished",
                    "use fewer prompts or tokens, or a faster machine",
                )
            time.sleep(0.2)
    with contextlib.suppress(subprocess.TimeoutExpired):  # all runs are written; the caller kills
        process.wait(timeout=60)


def _num_finished(result: Path) -> int:
    return len(json.loads(result.read_text())["runs"]) if result.is_file() else 0


def _last_complaint(log: Path) -> str:
    """The log from its last exception on, without the frames; else its last lines."""
    text = log.read_text(errors="replace")
    lines = [RANK.sub("", line).strip() for line in text.splitlines() if line.strip()]
    exceptions = [i for i, line in enumerate(lines) if EXCEPTION.match(line)]
    return " / ".join(lines[exceptions[-1] :] if exceptions else lines)[-MESSAGE_LENGTH:]


def _keep(log: Path) -> Path:
    """Copy the log out of the folder that is about to go."""
    handle, name = tempfile.mkstemp(prefix="mtp-probe-", suffix=".log")
    os.close(handle)
    return Path(shutil.copy(log, name))


def _add_metrics(run: dict[str, Any]) -> None:
    if run["num_speculative_tokens"]:
        from mtp.acceptance import AcceptanceCounts

        counts = AcceptanceCounts(
            run["num_speculative_tokens"], run["num_drafts"], run["accepted_per_position"]
        )
        run |= counts.as_dict()
