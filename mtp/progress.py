"""Progress bars on stderr, silent when it is not a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
