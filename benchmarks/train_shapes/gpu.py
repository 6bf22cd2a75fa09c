"""Timing, memory and the machine's matrix rate; every case ends in one line of JSON."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SCHEMA_VERSION = 1
GIB = 2**30

# Part of a step by what its kernels' names hold, the first that fits.
KERNELS = (
    ("loss terms", ("_row_terms", "_row_statistics")),
    ("attention", ("flash", "fmha", "attention")),
    ("grouped products", ("group", "Group")),
    ("products", ("gemm", "nvjet", "xmma", "cutlass", "gemv")),
    ("optimizer and clipping", ("multi_tensor", "Adam")),
    ("moving rows", ("index", "gather", "scatter", "ort", "Radix", "scan")),
    ("copies and casts", ("copy", "Memcpy", "Memset", "Cat", "Fill")),
)


def wait_for_turn(path: Path | None) -> None:
    """Return once `path` exists: a case imports while the one before it still has the GPU."""
    while path is not None and not path.exists():
        time.sleep(0.05)


@contextlib.contextmanager
def quiet(command: str) -> Iterator[None]:
    """Neighbours stand still: `command pause` before, `command resume` after; "" for none."""
    if command:
        subprocess.run([*command.split(), "pause"], check=True)
    try:
        yield
    finally:
        if command:
            subprocess.run([*command.split(), "resume"], check=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_rate(device: torch.device, size: int = 8192, repeats: int = 10) -> float:
    """FLOP/s of a bfloat16 product of two random [size, size] matrices, on a CPU a float32 one."""
    dtype = torch.bfloat16
    if device.type != "cuda":
        size, repeats, dtype = 512, 2, torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        a @ b
    synchronize(device)
    return 2 * size**3 * repeats / (time.perf_counter() - started)


class Stopwatch:
    """GPU time of wrapped functions, by name, from events on the stream; wall time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace `owner.attribute` by itself, timed."""
        function = getattr(owner, attribute)

        def timed(*positional: Any, **keywords: Any) -> Any:
            start = self._mark()
            result = function(*positional, **keywords)
            self._spans[name].append((start, self._mark()))
            return result

        setattr(owner, attribute, timed)

    def read(self) -> dict[str, float]:
        """Seconds by name since the last reading."""
        spans, self._spans = self._spans, defaultdict(list)
        if self._on_gpu:
            torch.cuda.synchronize()
            return {n: sum(a.elapsed_time(b) for a, b in s) / 1e3 for n, s in spans.items()}
        return {name: sum(b - a for a, b in s) for name, s in spans.items()}

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def timed_steps(step: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Wall seconds of whole steps, the device idle before and after each; peak memory is theirs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def num_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memory(
    trained: list[torch.nn.Parameter],
    frozen: list[torch.Tensor],
    optimizers: list[torch.optim.Optimizer],
) -> dict[str, float]:
    """GiB: what a trainer must hold, the peak, and what the peak holds beyond the former.

    Gradients count as beyond; they are also given alone.
    """
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    held = {
        "trained weights": num_bytes(trained),
        "frozen weights": num_bytes(frozen),
        "optimizer state": num_bytes(states),
    }
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found = held | {
        "gradients": num_bytes(trained),
        "peak": peak,
        "peak beyond weights and optimizer state": peak - sum(held.values()),
    }
    return {name: value / GIB for name, value in found.items()}


def profile(step: Callable[[], Any], path: Path | None) -> None:
    """Profile one step into a text file: milliseconds by part, then the 25 longest kernels."""
    if path is None:
        return
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    on_gpu = torch.cuda.is_available()
    with recording(activities=[getattr(ProfilerActivity, "CUDA" if on_gpu else "CPU")]) as record:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for event in record.events():
        if event.device_type == wanted:
            spent[event.name] += event.time_range.elapsed_us() / 1e3
            count[event.name] += 1
    parts: dict[str, float] = defaultdict(float)
    for name, milliseconds in spent.items():
        part = next((p for p, marks in KERNELS if any(m in name for m in marks)), "elementwise")
        parts[part] += milliseconds
    names = sorted(spent, key=lambda name: -spent[name])[:25]
    lines = [
        *(f"{parts[part]:10.2f} ms           {part}" for part in sorted(parts, key=parts.get)),
        "",
        *(f"{spent[name]:10.2f} ms {count[name]:6d} x  {name[:180]}" for name in names),
    ]
    path.write_text("\n".join(lines) + "\n")


def emit(record: dict[str, Any], path: Path | None) -> None:
    """Print a case as one line of JSON, and append it to a file."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    line = json.dumps(
        {"schema_version": SCHEMA_VERSION, "device": device, "torch": torch.__version__} | record
    )
    print(line, flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(line + "\n")
