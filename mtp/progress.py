"""Progress bars on stderr, silent when it is not a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(
    iterable: Iterable[T], description: str, total: int | None = None, unit: str = "it"
) -> Iterator[T]:
    """Yield from `iterable` under a progress bar; nothing is drawn without a terminal."""
    import sys

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
    import sys

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
