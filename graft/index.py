"""Shard headers and the shard index, read with suspicion.

Headers are parsed here instead of by safetensors because a checkpoint of several shards must be
planned from names, shapes and byte ranges alone, and because every lie a header can tell (length
past the file, overlap, trailing bytes) should be reported with the file's name.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from graft.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
MAX_JSON_BYTES = 100_000_000  # an index of 124,468 tensors takes 15 MB
MAX_JSON_DEPTH = 50  # configs nest 5 deep; copying and comparing recurse
MAX_NAME_BYTES = 255  # of one file name on every usual file system
MAX_ELEMENTS = 2**64 - 1  # safetensors refuses a product of sizes past it
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # one half of a pair, spelled out in JSON
LFS_POINTER = b"version https://git-lfs"
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
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
        size = _regular_size(path)
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
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, "a __metadata__ that is not text by key, as safetensors requires")
    tensors = [_tensor_info(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    _check_extent(path, tensors, 8 + length, size)
    return {info.name: info for info in tensors}


def _header_length(path: Path, size: int, start: bytes) -> int:
    if size == 0:
        raise _broken(path, "a file of 0 bytes")
    if start.startswith(LFS_POINTER):
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
    if not _is_plain(name):
        raise _broken(path, f"the tensor name {_shown(name)}, which cannot be printed")
    if not isinstance(entry, dict):
        raise _broken(path, f"a malformed entry for tensor {name}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _broken(path, f"tensor {name} of unknown dtype {_shown(dtype)}")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise _broken(path, f"tensor {name} with a malformed shape or offsets")
    begin, end = offsets
    if (num_elements := _num_elements(shape)) is None:
        raise _broken(path, f"tensor {name} whose shape has over {MAX_ELEMENTS} elements")
    if (end - begin) * 8 != num_elements * DTYPE_BITS[dtype]:
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


def _regular_size(path: Path) -> int:
    """Size of a regular file, through links: a pipe or a device would never end."""
    if path.is_symlink() and not path.exists():
        raise OSError(None, f"a broken link to {path.readlink()}")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(None, "something that is not a plain file")
    return status.st_size


def _is_plain(name: str) -> bool:
    """Printable and not empty: no control characters for terminals, no halves of characters."""
    return name.isprintable() and name != ""


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _num_elements(shape: list[int]) -> int | None:
    """Product of the sizes, or None where it does not fit 64 bits on the way (as safetensors)."""
    product = 1
    for size in shape:
        product *= size
        if max(product, size) > MAX_ELEMENTS:
            return None
    return product


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"key {_shown(name)} appears twice")
            seen.add(name)
    return result


def _broken(path: Path, found: str) -> UserError:
    return UserError(
        f"a sound safetensors file at {path}", found, "download or write that file again"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise UserError naming the file."""
    try:
        size = _regular_size(path)
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes, more than such a file can need")
        raw = path.read_bytes()
        if raw.startswith(LFS_POINTER):
            raise ValueError("a Git LFS pointer instead of the file")
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        if SURROGATE.search(raw):  # half a character could be read but not written
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        found = error.strerror or str(error)
        raise UserError(f"a readable file {path}", found, "restore that file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"JSON in {path}", f"{error}", "restore that file") from error
    if not isinstance(value, dict):
        raise UserError(f"a JSON object in {path}", type(value).__name__, "restore that file")
    if _is_deeper_than(value, MAX_JSON_DEPTH):
        raise UserError(
            f"JSON nested at most {MAX_JSON_DEPTH} deep in {path}", "more", "restore that file"
        )
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name}, which is no JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {_shown(text)}, which is too large")
    return value


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


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
    checked: set[str] = set()  # few files hold many tensors
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or not _is_plain(name)
            or not (shard in checked or is_file_name(shard))
        ):
            raise UserError(
                f"printable tensor names and plain file names in {path}",
                f"{_shown(shard)} for tensor {_shown(name)}",
                "do not use this checkpoint: its index points outside its folder",
            )
        if not shard.endswith(".safetensors"):
            raise UserError(
                f"safetensors shards in {path}", f"{shard}", "convert the weights to safetensors"
            )
        checked.add(shard)
    return weight_map, metadata if isinstance(metadata, dict) else {}


def is_file_name(name: str) -> bool:
    """Whether this names a file of a folder: no path, nothing that a terminal would obey."""
    return (
        name == PurePosixPath(name).name
        and name not in ("", ".", "..")
        and "\\" not in name
        and _is_plain(name)
        and len(name.encode()) <= MAX_NAME_BYTES
    )


def index_of(tensors: Iterable[TensorInfo], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Build an index from shard headers; `total_size` is the sum of tensor bytes, not of files."""
    ordered = sorted(tensors, key=lambda info: info.name)
    return {
        "metadata": {**metadata, "total_size": sum(info.nbytes for info in ordered)},
        "weight_map": {info.name: info.shard.name for info in ordered},
    }
