"""Shard headers and the shard index, read with suspicion.

Headers are parsed here instead of by safetensors because a checkpoint of several shards must be
planned from names, shapes and byte ranges alone, and because every lie a header can tell (length
past the file, overlap, trailing bytes) should be reported with the file's name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from graft.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a shard: `dtype` as safetensors spells it, `offset` counted from file start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of one safetensors file.

    Returns:
        Tensors by name, in file order.

    Raises:
        UserError: for a file that is missing, empty, truncated, not safetensors, or inconsistent.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
            length = _header_length(path, size, start)
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"a header that is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, "a header that is not a JSON object")
    header.pop("__metadata__", None)
    tensors = [_tensor_info(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    _check_extent(path, tensors, 8 + length, size)
    return {info.name: info for info in tensors}


def _header_length(path: Path, size: int, start: bytes) -> int:
    if size == 0:
        raise _broken(path, "a file of 0 bytes")
    if start.startswith(b"version https://git-lfs"):
        raise _broken(path, "a Git LFS pointer instead of the file")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise _broken(path, "a web page (HTML or XML) instead of the file")
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > MAX_HEADER_BYTES:
        raise _broken(path, f"a file of {size} bytes whose header would take {length}")
    if 8 + length > size:
        raise _broken(path, f"a header of {length} bytes cut off by the file's end at {size}")
    return length


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _broken(path, f"a malformed entry for tensor {name}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in DTYPE_BITS:
        raise _broken(path, f"tensor {name} of unknown dtype {dtype!r}")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise _broken(path, f"tensor {name} with a malformed shape or offsets")
    begin, end = offsets
    wanted = math.prod(shape) * DTYPE_BITS[dtype]
    if (end - begin) * 8 != wanted:
        raise _broken(
            path, f"tensor {name} whose {dtype} shape {shape} does not fit {end - begin} bytes"
        )
    return TensorInfo(
        name=name, dtype=dtype, shape=tuple(shape), shard=path,
        offset=data_start + begin, nbytes=end - begin,
    )  # fmt: skip


def _check_extent(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    for info in tensors:
        if info.offset != position:
            kind = "overlaps the one before" if info.offset < position else "leaves a gap before it"
            raise _broken(path, f"tensor {info.name}, which {kind}")
        position += info.nbytes
    if position > size:
        raise _broken(path, f"{size} bytes where the header promises {position}: truncated")
    if position < size:
        raise _broken(path, f"{size - position} trailing bytes after the last tensor")


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return result


def _broken(path: Path, found: str) -> UserError:
    return UserError(
        f"a sound safetensors file at {path}", found, "download or write that file again"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise UserError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_pairs)
    except OSError as error:
        found = error.strerror or str(error)
        raise UserError(f"a readable file {path}", found, "restore that file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"JSON in {path}", f"{error}", "restore that file") from error
    if not isinstance(value, dict):
        raise UserError(f"a JSON object in {path}", type(value).__name__, "restore that file")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON as transformers does: two spaces, a newline at the end."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Read the index: tensor -> shard, and its metadata.

    Raises:
        UserError: for an index without a map, or whose shard names leave the folder.
    """
    index = read_json(path)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"a weight_map in {path}", "none", "restore that file")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise UserError(
                f"shard names inside the folder in {path}",
                f"{shard!r} for tensor {name}",
                "do not use this checkpoint: its index points outside its folder",
            )
        if not shard.endswith(".safetensors"):
            raise UserError(
                f"safetensors shards in {path}", f"{shard}", "convert the weights to safetensors"
            )
    return weight_map, metadata if isinstance(metadata, dict) else {}


def _stays_inside(name: str) -> bool:
    return name == PurePosixPath(name).name and name not in ("", "..") and "\\" not in name


def index_of(tensors: Iterable[TensorInfo], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Build an index from shard headers; `total_size` is the sum of tensor bytes, not of files."""
    ordered = sorted(tensors, key=lambda info: info.name)
    return {
        "metadata": {**metadata, "total_size": sum(info.nbytes for info in ordered)},
        "weight_map": {info.name: info.shard.name for info in ordered},
    }
