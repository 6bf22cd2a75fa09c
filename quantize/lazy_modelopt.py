"""nvidia-modelopt, imported late, silently, and on a stack of its own.

Its import takes seconds and half a gigabyte. It also keeps the error of an optional module that is
not installed; the error holds its traceback, that the frames of every caller, and they whatever
was calibrated first: 3.4 GB for a layer at a 35B's sizes, or a whole base, until the process ends.
A thread's stack begins empty, so there is nothing of ours to keep.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any


def modelopt_module(name: str) -> Any:
    """The module `modelopt.torch.NAME`."""
    with quiet():
        return import_apart(f"modelopt.torch.{name}")


def import_apart(name: str) -> Any:
    """Import a module by its full name so that it cannot keep its importer's variables alive."""
    with ThreadPoolExecutor(1) as own_stack:
        return own_stack.submit(import_module, name).result()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """modelopt prints to stdout, which is for `--json`, and warns of newer versions."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
