"""The prepared folder: a `datasets` DatasetDict plus data.json, written and read.

Rows are streamed to an Arrow file first, so memory does not grow with the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from graft.errors import UserError
from graft.manifest import file_digest
from mtp.data.hub import HUB_PREFIX

SCHEMA_VERSION = 1
SPLITS = ("train", "held_out")
COLUMNS = ("input_ids", "loss_mask", "category", "conversation_id", "source")
MANIFEST = "data.json"
_ROWS_A_CHUNK = 256


class RowWriter:
    """Collects rows in one Arrow file under `folder`, and deals them to the splits at the end.

    Which rows are kept, and how often, can be decided when all have been seen.
    """

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        folder.mkdir()
        self._folder = folder
        self._schema = pa.schema(
            {
                "input_ids": pa.list_(pa.int32()),
                "loss_mask": pa.list_(pa.bool_()),
                "category": pa.string(),
                "conversation_id": pa.string(),
                "source": pa.string(),
                "num_replies": pa.int32(),
                "num_replies_with_calls": pa.int32(),
            }
        )
        self._pending: list[dict[str, Any]] = []
        self._collected = folder / "collected.arrow"
        self._writer = pa.ipc.new_stream(str(self._collected), self._schema)
        self.num_rows = 0

    def add(self, **columns: Any) -> None:
        """Append a row: input_ids [T] int32, loss_mask [T] bool, and the other columns."""
        self._pending.append(columns)
        self.num_rows += 1
        if len(self._pending) >= _ROWS_A_CHUNK:
            self._flush()

    def batches(self) -> Iterator[tuple[int, Any]]:
        """(number of the first row, Arrow batch) of all rows so far; none can be added after."""
        import pyarrow as pa

        self.close()
        first = 0
        with pa.OSFile(str(self._collected)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                yield first, batch
                first += batch.num_rows

    def save(self, out: Path, copies: dict[str, np.ndarray]) -> None:
        """Write the DatasetDict to `out`; copies: for each split [N] int64, how often each row."""
        import pyarrow as pa
        from datasets import Dataset, DatasetDict

        files = {split: str(self._folder / f"{split}.arrow") for split in SPLITS}
        with contextlib.ExitStack() as stack:
            writers = {
                split: stack.enter_context(pa.ipc.new_stream(file, self._schema))
                for split, file in files.items()
            }
            for first, batch in self.batches():
                for split, writer in writers.items():
                    here = copies[split][first : first + batch.num_rows]
                    taken = np.repeat(np.arange(batch.num_rows), here)
                    if len(taken):
                        writer.write_batch(batch.take(pa.array(taken)))
        self._collected.unlink()
        with _quiet_progress():
            # `datasets` would map all rows into memory to write them anew, and to open a file
            # takes a page or more of each of its batches: it gets the first row alone, to write
            # its notes, and the file that is there takes that row's place.
            heads = {split: Dataset.from_file(self._head(file)) for split, file in files.items()}
            DatasetDict(heads).save_to_disk(str(out))
        for split in SPLITS:
            for written in (out / split).glob("*.arrow"):
                Path(files[split]).replace(written)
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Finish the file; safe to call twice."""
        if self._writer is not None:
            self._flush()
            self._writer.close()
            self._writer = None

    def _head(self, file: str) -> str:
        """A file with the first row of another, if it has any."""
        import pyarrow as pa

        head = f"{file}.head"
        with (
            pa.OSFile(file) as source,
            pa.ipc.open_stream(source) as rows,
            pa.ipc.new_stream(head, self._schema) as writer,
        ):
            for batch in itertools.islice(rows, 1):
                writer.write_batch(batch.slice(0, 1))
        return head

    def _flush(self) -> None:
        import pyarrow as pa

        if self._pending:
            self._writer.write_batch(pa.RecordBatch.from_pylist(self._pending, self._schema))
            self._pending.clear()


def write_manifest(folder: Path, fields: dict[str, Any]) -> None:
    """Write data.json."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **fields}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read data.json.

    Raises:
        UserError: missing, broken, or of another schema version.
    """
    expected = f"a folder made by 'mtp data prepare' (with {MANIFEST})"
    action = "run 'mtp data prepare' and pass its --out"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(expected, f"no {MANIFEST} in {folder}", action) from error
    except ValueError as error:
        raise UserError(expected, f"a broken {folder / MANIFEST}", action) from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        found = f"version {version!r} in {folder / MANIFEST}"
        raise UserError(f"data of schema version {SCHEMA_VERSION}", found, "prepare the data again")
    return manifest


def licences_by_source(manifest: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Conversations by licence for each source of a read data.json, without local folders' names.

    What is published (a model card) must not tell where files lay on someone's machine.
    """
    found: dict[str, Counter[str]] = {}
    for place, counts in manifest.get("report", {}).get("by_source", {}).items():
        name = place if place.startswith(HUB_PREFIX) else Path(place).resolve().name
        found.setdefault(name, Counter()).update(counts.get("licences", {}))
    return {name: dict(licences) for name, licences in sorted(found.items()) if licences}


def require_tokenizer_of(folder: Path, base: Path) -> None:
    """Refuse data that was prepared with another tokenizer than `base` has.

    Raises:
        UserError: the two differ, or one of them is missing.
    """
    prepared_with = read_manifest(folder).get("tokenizer_sha256")
    tokenizer = base / "tokenizer.json"
    found = file_digest(tokenizer) if tokenizer.is_file() else "none"
    if prepared_with != found:
        raise UserError(
            f"data prepared with the tokenizer of {base}",
            f"{folder}, prepared with another ({str(prepared_with)[:12]}, not {found[:12]})",
            "prepare the data again with this --base",
        )


def rows_digest(folder: Path) -> str:
    """SHA-256 over tokens, masks and categories of a prepared folder, all splits, as hex."""
    digest = hashlib.sha256()
    for split, rows in sorted(load_prepared(folder).items()):
        digest.update(split.encode())
        columns = rows.select_columns(["input_ids", "loss_mask", "category"]).with_format("arrow")
        for table in columns.iter(batch_size=1024) if len(rows) else ():
            for column in ("input_ids", "loss_mask"):
                values = table.column(column).combine_chunks()
                for part in (values.value_lengths(), values.flatten()):
                    digest.update(part.to_numpy(zero_copy_only=False).tobytes())
            digest.update("\0".join(table.column("category").to_pylist()).encode())
    return digest.hexdigest()


def load_prepared(folder: Path) -> Any:
    """The DatasetDict of a prepared folder, memory-mapped, with splits `train` and `held_out`.

    Raises:
        UserError: the folder is missing, incomplete, or of another schema version.
    """
    from datasets import DatasetDict

    folder = Path(folder)
    read_manifest(folder)
    expected = f"splits {' and '.join(SPLITS)} with columns {', '.join(COLUMNS)}"
    action = "prepare the data again"
    try:
        data = DatasetDict({split: _load_split(folder / split) for split in SPLITS})
    except (OSError, ValueError, KeyError) as error:
        raise UserError(expected, f"{folder}: {str(error)[:200]}", action) from error
    for split in SPLITS:
        missing = sorted(set(COLUMNS) - set(data[split].column_names))
        if missing:
            raise UserError(expected, f"no {', '.join(missing)} in {folder}/{split}", action)
    return data


def _load_split(folder: Path) -> Any:
    from datasets import Dataset, DatasetInfo

    if (folder / "state.json").is_file() and not any(folder.glob("*.arrow")):
        # A split without rows is saved without a file, which `datasets` cannot load again.
        features = DatasetInfo.from_directory(str(folder)).features
        return Dataset.from_dict({name: [] for name in features}, features=features)
    return Dataset.load_from_disk(str(folder))


@contextlib.contextmanager
def _quiet_progress() -> Iterator[None]:
    """No bars of `datasets` in logs: as ours, they are for terminals."""
    from datasets.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
