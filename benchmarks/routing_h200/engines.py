"""Start, ask and stop the engines of WORK/variants.json, one process each (`worker.py`).

    python engines.py start WORK SECONDS [NAME...]   # wait until ready
    python engines.py stop WORK [NAME...]            # memory and threads of the others are freed

WORK/variants.json: {"variants": {name: {"checkpoint", "num_speculative_tokens", "engine",
"environment"}}, ...}; `variants.py` writes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


def plan_of(work: Path) -> dict[str, Any]:
    return json.loads((work / "variants.json").read_text())


def start(work: Path, timeout: float, names: list[str]) -> None:
    """Start engines and wait."""
    variants = plan_of(work)["variants"]
    names = names or list(variants)
    for name in names:
        folder = work / name
        folder.mkdir(exist_ok=True)
        spec = dict(variants[name])
        (folder / "spec.json").write_text(json.dumps(spec))
        log = (folder / "log.txt").open("w")
        environment = {**os.environ, **spec["environment"]}
        if first := environment.pop("PYTHONPATH_FIRST", None):
            environment["PYTHONPATH"] = f"{first}:{environment.get('PYTHONPATH', '')}"
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)], stdout=log, stderr=log,
            env=environment, start_new_session=True, cwd=folder,
        )  # fmt: skip
        (folder / "pid").write_text(str(process.pid))
        time.sleep(1)
    deadline = time.monotonic() + timeout
    waiting = list(names)
    while waiting and time.monotonic() < deadline:
        for name in list(waiting):
            if (work / name / "failed.txt").exists():
                print(name, "FAILED", (work / name / "failed.txt").read_text()[-1500:])
                waiting.remove(name)
            elif is_ready(work, name):
                print(name, (work / name / "ready.json").read_text(), flush=True)
                waiting.remove(name)
        time.sleep(0.5)
    if waiting:
        print("not ready yet:", waiting)


def is_ready(work: Path, name: str) -> bool:
    return (work / name / "ready.json").exists()


def ask(work: Path, name: str, request: dict[str, Any], timeout: float = 200) -> dict[str, Any]:
    """What `worker.generate` measured.

    Raises:
        RuntimeError: the engine died or did not answer in time.
    """
    try:
        with Client(str(work / name / "socket"), "AF_UNIX") as connection:
            connection.send(request)
            if connection.poll(timeout):
                return connection.recv()
    except (OSError, EOFError) as error:
        raise RuntimeError(f"{name}: {error!r}") from error
    raise RuntimeError(f"{name}: no answer within {timeout:.0f} s")


def pin(work: Path, names: list[str], cores: list[int]) -> None:
    """Bind every thread of these engines to the same cores.

    They are asked one at a time, and cores of one host differ by more than what is compared.
    """
    groups = {int((work / name / "pid").read_text()) for name in names}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # one that ended meanwhile
            if process.name.isdigit() and os.getpgid(int(process.name)) in groups:
                for thread in (process / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), cores)


def stop(work: Path, names: list[str]) -> None:
    for path in [work / name / "pid" for name in names or plan_of(work)["variants"]]:
        # Workers lead a process group each, which holds their engine's process.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.killpg(int(path.read_text()), signal.SIGKILL)
        (path.parent / "ready.json").unlink(missing_ok=True)
        (path.parent / "socket").unlink(missing_ok=True)


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    else:
        stop(Path(sys.argv[2]), sys.argv[3:])
