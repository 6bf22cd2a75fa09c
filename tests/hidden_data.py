"""A small base with a tokenizer file, and a prepared folder of random rows that fits it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict

from graft.manifest import file_digest
from mtp.data.store import write_manifest


def write_rows(
    folder: Path, base: Path, *, num_rows: int = 24, vocabulary: int = 64, seed: int = 0
) -> Path:
    """A prepared folder: rows of 3 to 40 random tokens, a sixth of them held out."""
    tokenizer = base / "tokenizer.json"
    if not tokenizer.exists():
        tokenizer.write_text('{"version": "1.0"}')
    generator = np.random.default_rng(seed)
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": []}
    for number in range(num_rows):
        ids = generator.integers(0, vocabulary, generator.integers(3, 41)).astype(np.int32)
        rows["held_out" if number % 6 == 5 else "train"].append(
            {"input_ids": ids, "loss_mask": np.ones(len(ids), bool), "category": "code",
             "conversation_id": f"c{number}", "source": "rows.jsonl"}
        )  # fmt: skip
    DatasetDict({split: Dataset.from_list(some) for split, some in rows.items()}).save_to_disk(
        str(folder)
    )
    write_manifest(folder, {"tokenizer_sha256": file_digest(tokenizer)})
    return folder


def batch_of(dataset: Any, rows: list[int], width: int | None = None) -> SimpleNamespace:
    """A right-padded batch of these rows."""
    ids = [torch.tensor(dataset[row]["input_ids"]) for row in rows]
    lengths = torch.tensor([len(row) for row in ids])
    padded = torch.zeros(len(ids), width or int(lengths.max()), dtype=torch.long)
    for target, row in zip(padded, ids, strict=True):
        target[: len(row)] = row
    return SimpleNamespace(input_ids=padded, lengths=lengths, rows=tuple(rows))
