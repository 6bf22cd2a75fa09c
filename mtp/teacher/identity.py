"""What hidden states belong to: one base, one sequence of training rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft.manifest import base_fingerprint
from graft.reader import HEAD_PREFIX, Checkpoint
from mtp.data.store import load_prepared, read_manifest

_SAMPLE_BYTES = 256
_ROWS_AT_ONCE = 1024


def base_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fingerprint that pairs a head with its base, and a digest over the trunk.

    A fingerprint holds the tensors that a head shares with its base; hidden states depend on all
    layers. Reading 70 GB to know them again would cost more than it is worth: the digest takes
    every tensor's name, dtype and shape, and 256 bytes from its middle, which any training changes.
    """
    return {"fingerprint": base_fingerprint(checkpoint), "trunk_sha256": _trunk_digest(checkpoint)}


def _trunk_digest(checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256()
    for shard, header in sorted(checkpoint.shards.items()):
        wanted = [info for name, info in header.items() if not name.startswith(HEAD_PREFIX)]
        if not wanted:
            continue
        with (checkpoint.folder / shard).open("rb") as file:
            for info in wanted:
                size = min(_SAMPLE_BYTES, info.nbytes)
                file.seek(info.offset + (info.nbytes - size) // 2)
                digest.update(f"{info.name} {info.dtype} {info.shape}\n".encode())
                digest.update(file.read(size))
    return digest.hexdigest()


def data_identity(data: Path, splits: list[str]) -> dict[str, Any]:
    """Token ids of each split in order, and what made them. Masks don't matter to hidden states."""
    manifest, rows = read_manifest(data), load_prepared(data)
    digests = {}
    for split in splits:
        digest = hashlib.sha256()
        columns = rows[split].select_columns(["input_ids"]).with_format("arrow")
        for start in range(0, len(columns), _ROWS_AT_ONCE):
            for row in columns[start : start + _ROWS_AT_ONCE].column("input_ids"):
                ids = row.values.to_numpy()
                digest.update(len(ids).to_bytes(8, "little"))
                digest.update(ids.astype("<i4").tobytes())
        digests[split] = digest.hexdigest()
    made_with = {key: manifest.get(key) for key in ("tokenizer_sha256", "chat_template_sha256")}
    return {**made_with, "token_ids_sha256": digests}


def differences(cached: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Say in words where two identities differ."""
    found = []
    for key in sorted(cached.keys() | given.keys()):
        left, right = cached.get(key), given.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(f"{prefix}{key}: {str(left)[:12]} in the cache, {str(right)[:12]} given")
    return found
