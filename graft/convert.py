"""Head tensors in another form than they are stored in, made while they are written.

An NVFP4 head as modelopt names it becomes what the base's quantization can state: for
compressed-tensors under other names and with the reciprocal of each tensor scale, for W4A16 without
input scales, and dequantized where NVFP4 can't be stated at all. Planning reads headers only; bytes
are made one block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graft.errors import UserError
from graft.formats import NVFP4_BLOCK, NVFP4_CODES, Form
from graft.index import TensorInfo
from graft.values import float_values

ROWS_BYTES = 2 * 1024 * 1024
"""Output bytes made at once; intermediate values take about eight times as much."""
_CODES = np.array([*NVFP4_CODES, *(-code for code in NVFP4_CODES)], np.float32)
TO_COMPRESSED_TENSORS = {
    "weight": "weight_packed",
    "weight_scale": "weight_scale",
    "weight_scale_2": "weight_global_scale",
    "input_scale": "input_global_scale",
}
TO_MODELOPT = {new: old for old, new in TO_COMPRESSED_TENSORS.items()}
INPUT_SCALES = ("input_scale", "input_global_scale")
TENSOR_SCALES = ("weight_scale_2", "input_scale", "weight_global_scale", "input_global_scale")


@dataclass(frozen=True, kw_only=True)
class Reciprocal:
    """A tensor scale as the other format states it: 1 / x, F32."""

    name: str
    shape: tuple[int, ...]
    source: TensorInfo
    dtype: str = "F32"
    nbytes: int = 4

    def chunks(self) -> Iterator[bytes]:
        """Yield the tensor's bytes."""
        values = float_values(_read(self.source), self.source.dtype)
        yield (np.float32(1) / values).astype("<f4").tobytes()


@dataclass(frozen=True, kw_only=True)
class Dequantized:
    """An NVFP4 matrix as BF16 [out, in]; `tensor_scale` is inverted where the format says so."""

    name: str
    weight: TensorInfo
    block_scale: TensorInfo
    tensor_scale: TensorInfo
    dtype: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        rows, half = self.weight.shape
        return rows, 2 * half

    @property
    def nbytes(self) -> int:
        """Bytes of the BF16 matrix."""
        rows, columns = self.shape
        return 2 * rows * columns

    def chunks(self) -> Iterator[bytes]:
        """Yield the tensor's bytes, some rows at a time."""
        rows, columns = self.shape
        scale = float_values(_read(self.tensor_scale), "F32")[0]
        if self.tensor_scale.name.endswith("weight_global_scale"):
            scale = np.float32(1) / scale
        step = max(1, ROWS_BYTES // (2 * columns))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            packed = np.frombuffer(_read(self.weight, start, count), "u1")
            codes = np.stack([packed & 0xF, packed >> 4], axis=-1)
            scales = float_values(_read(self.block_scale, start, count), "F8_E4M3") * scale
            values = _CODES[codes].reshape(-1, NVFP4_BLOCK) * scales[:, None]
            yield _bfloat16(values).tobytes()


class MadeTensor(Protocol):
    """A tensor whose bytes are made while it is written; `quantize` makes some too."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def chunks(self) -> Iterator[bytes]: ...


PlannedTensor = TensorInfo | MadeTensor


def convert_head(tensors: Iterable[TensorInfo], old: Form, new: Form) -> tuple[PlannedTensor, ...]:
    """The tensors of a head in another form; what both have in common stays a byte range.

    Raises:
        UserError: for a form that these tensors don't hold.
    """
    tensors = list(tensors)
    if old == new:
        return tuple(tensors)
    if not old.startswith("nvfp4") or (old.endswith("w4a16") and _needs_input_scales(new)):
        raise UserError(
            f"a head that can be written as {new}",
            f"one in the form {old}",
            "graft the BF16 form of the head, or one quantized with input scales",
        )
    by_name = {info.name: info for info in tensors}
    converted: list[PlannedTensor] = []
    for info in tensors:
        module, _, part = info.name.rpartition(".")
        if f"{module}.weight_scale" not in by_name:
            converted.append(info)
        elif new == "bf16-per-expert":
            if part in ("weight", "weight_packed"):
                converted.append(_dequantized(module, info, by_name))
        elif part not in INPUT_SCALES or _needs_input_scales(new):
            converted.append(_renamed(module, part, info, new))
    return tuple(converted)


def _needs_input_scales(form: Form) -> bool:
    return form in ("nvfp4-modelopt", "nvfp4-compressed-tensors")


def _renamed(module: str, part: str, info: TensorInfo, new: Form) -> PlannedTensor:
    to_compressed = new.startswith("nvfp4-compressed-tensors")
    names = TO_COMPRESSED_TENSORS if to_compressed else TO_MODELOPT
    if part not in names:
        return info
    name = f"{module}.{names[part]}"
    if part in TENSOR_SCALES:
        return Reciprocal(name=name, shape=(1,) if to_compressed else (), source=info)
    return replace(info, name=name)


def _dequantized(module: str, weight: TensorInfo, by_name: dict[str, TensorInfo]) -> Dequantized:
    scale = next(
        by_name[name]
        for name in (f"{module}.weight_scale_2", f"{module}.weight_global_scale")
        if name in by_name
    )
    return Dequantized(
        name=f"{module}.weight",
        weight=weight,
        block_scale=by_name[f"{module}.weight_scale"],
        tensor_scale=scale,
    )


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite float32 values as bfloat16 bits, rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def _read(info: TensorInfo, start: int = 0, count: int | None = None) -> bytes:
    """A stored tensor's bytes, or those of `count` of its rows from `start`."""
    row = info.nbytes // info.shape[0] if count is not None else info.nbytes
    nbytes = row * (1 if count is None else count)
    with info.shard.open("rb") as file:
        file.seek(info.offset + start * row)
        raw = file.read(nbytes)
    if len(raw) != nbytes:
        raise UserError(
            f"{info.shard} as it was when the graft was planned",
            "a shorter file",
            "run the graft again",
        )
    return raw
