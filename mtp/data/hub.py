"""Data sets of the `datasets` library: folders that it saved, and the Hub, streamed.

The Hub is asked only when a source says so (`hub:`), and always at one revision: the one that was
named, or the newest at the start, which the report then records.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from graft.errors import UsageError, UserError
from mtp.data.rows import Rows

HUB_PREFIX = "hub:"
_OPTIONS = ("config", "split", "revision")


def is_dataset_folder(folder: Path) -> bool:
    """Whether `save_to_disk` wrote it."""
    saved = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return saved or (folder / "dataset_dict.json").is_file()


def saved_rows(folder: Path) -> Iterator[tuple[str, Rows]]:
    """(name of the part, its rows), memory-mapped, for every split.

    Raises:
        UserError: the folder is incomplete.
    """
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        expected = "a folder that datasets' save_to_disk wrote"
        raise UserError(expected, f"{folder}: {str(error)[:200]}", "save it again") from error
    if isinstance(loaded, Dataset):
        yield str(folder), enumerate(loaded, start=1)
    else:
        for split, rows in loaded.items():
            yield f"{folder}/{split}", enumerate(rows, start=1)


def hub_rows(source: str) -> tuple[str, Rows]:
    """(`owner/name@revision`, the rows) of `hub:owner/name?config=...&split=...&revision=...`.

    Raises:
        UserError: an unknown option, or a data set that cannot be had.
    """
    from datasets import load_dataset

    name, _, query = source.removeprefix(HUB_PREFIX).partition("?")
    options = dict(parse_qsl(query))
    expected = "hub:owner/name?config=...&split=...&revision=..."
    if not name or not set(options) <= set(_OPTIONS):
        raise UsageError(expected, source, "fix --source")
    try:
        revision = options.get("revision") or _newest_revision(name)
        rows = load_dataset(
            name,
            options.get("config"),
            split=options.get("split", "train"),
            revision=revision,
            streaming=True,
        )
    except Exception as error:  # whatever the Hub, the network or the builder raises
        raise UserError(expected, f"{source}: {str(error)[:200]}", "fix --source") from error
    return f"{name}@{revision}", enumerate(_plain(rows), start=1)


def _newest_revision(name: str) -> str | None:
    from huggingface_hub import HfApi

    return HfApi().dataset_info(name).sha


def _plain(rows: Any) -> Iterator[Any]:
    yield from rows
