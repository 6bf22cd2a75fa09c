"""Progress bars on stderr, silent when it is not a terminal; and requests to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from graft.errors import UserError

T = TypeVar("T")


def track(
    iterable: Iterable[T], description: str, total: int | None = None, unit: str = "it"
) -> Iterator[T]:
    """Yield from `iterable` under a progress bar; nothing is drawn without a terminal."""
    from tqdm import tqdm

    yield from tqdm(
        iterable,
        desc=description,
        total=total,
        unit=unit,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
        leave=False,
    )


@contextlib.contextmanager
def bar(total: int, description: str, unit: str) -> Iterator[Callable[[int], object]]:
    """A progress bar with speed and time left; yields the function that moves it on."""
    from tqdm import tqdm

    with tqdm(
        desc=description,
        total=total,
        unit=unit,
        unit_scale=True,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
        leave=False,
    ) as drawn:
        yield drawn.update


class TrainingBar:
    """Steps done and left, tokens a second, loss, and the last measured acceptance.

    Args:
        total: steps of the whole run.
        done: steps that were done before.
        enabled: False draws nothing even on a terminal.
    """

    def __init__(self, total: int, done: int, *, enabled: bool = True) -> None:
        from tqdm import tqdm

        self._acceptance = ""
        self._bar = tqdm(
            desc="training",
            total=total,
            initial=done,
            unit="step",
            disable=not (enabled and sys.stderr.isatty()),
            dynamic_ncols=True,
            leave=False,
        )

    def show(self, record: dict[str, Any]) -> None:
        """One step further, with the record of the history."""
        if "cumulative" in record:
            accepted = "/".join(f"{share:.2f}" for share in record["cumulative"])
            self._acceptance = f", accepted {accepted}"
        self._bar.set_postfix_str(
            f"loss {record['loss']:.4f}, {record['tokens_per_second']:.0f} tokens/s"
            f"{self._acceptance}",
            refresh=False,
        )
        self._bar.update()

    def __enter__(self) -> TrainingBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


@contextlib.contextmanager
def stop_requests() -> Iterator[list[str]]:
    """Names of the signals (SIGTERM, SIGINT) that arrive inside; a second one acts at once.

    Outside the main thread, where Python takes no handlers, the list stays empty.
    """
    received: list[str] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, _: object) -> None:
        received.append(signal.Signals(number).name)
        for name, handler in before.items():
            signal.signal(name, handler)

    with contextlib.suppress(ValueError):
        for name in (signal.SIGTERM, signal.SIGINT):
            before[name] = signal.signal(name, note)
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def interrupted(requests: list[str], step: int, last: int, run: Path) -> UserError:
    """The error that ends a run which a signal asked to stop."""
    return UserError(
        f"{last} steps",
        f"{requests[0] if requests else 'a signal'} after step {step}, written to {run}",
        "pass --resume to go on",
    )
