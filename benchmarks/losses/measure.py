"""CPU time and memory of one measured function, in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def cpu_seconds(function: Callable[[], Any], repeats: int = 2) -> float:
    """Least CPU time of a call (one thread: the machine may be shared), after a first one."""
    function()
    times = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return min(times)


def peak_mib() -> float:
    """Largest resident size of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(script: str, *arguments: object) -> dict[str, Any]:
    """Run `script` with arguments; its last line of output is JSON."""
    command = [sys.executable, script, *map(str, arguments)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])
