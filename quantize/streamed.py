"""Expert matrices of a checkpoint on disk, packed one by one while a shard is written.

A base is larger than memory and its experts lie in any order, fused or one by one. So a matrix is a
byte range here, a slice of a fused tensor included, and it is read when its turn comes. What is
known of it beforehand are its shapes, which is all that a shard's header needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from graft.convert import PlannedTensor
from graft.errors import UserError
from graft.formats import NVFP4_BLOCK
from graft.index import TensorInfo
from graft.layout import EXPERT_PROJECTIONS
from graft.modules import UNQUANTIZED_DTYPES
from graft.reader import HEAD_PREFIX, torch_dtype
from quantize.packing import FP4_MAX, FP8_MAX, WeightScales, largest, pack

_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_SINGLE = re.compile(r"(.*\.mlp\.experts\.\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, kw_only=True)
class ExpertMatrix:
    """One projection of one expert.

    module: its name, without the part. info: where its values lie. scaled_with: the matrices whose
    largest magnitude gives its tensor scale; gate and up share theirs. input_amax: the largest
    magnitude of its inputs, for W4A4.
    """

    module: str
    info: TensorInfo
    scaled_with: tuple[TensorInfo, ...]
    input_amax: float | None

    def parts(self) -> list[PlannedTensor]:
        """Its tensors as modelopt names them, in the order in which they are written."""
        rows, columns = self.info.shape
        found: list[PlannedTensor] = [
            PackedPart(self, "weight", "U8", (rows, columns // 2), rows * columns // 2),
            PackedPart(
                self, "weight_scale", "F8_E4M3", (rows, columns // NVFP4_BLOCK),
                rows * columns // NVFP4_BLOCK,
            ),
            PackedPart(self, "weight_scale_2", "F32", (), 4),
        ]  # fmt: skip
        if self.input_amax is not None:
            found.append(PackedPart(self, "input_scale", "F32", (), 4))
        return found


@dataclass(frozen=True)
class PackedPart:
    """One tensor of a packed matrix; see `graft.convert.MadeTensor`."""

    matrix: ExpertMatrix
    part: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def name(self) -> str:
        """As modelopt spells it."""
        return f"{self.matrix.module}.{self.part}"

    def chunks(self) -> Iterator[bytes]:
        """Yield the tensor's bytes."""
        yield _packed(self.matrix)[self.part]


def is_trunk_expert(name: str) -> bool:
    """Whether a tensor holds routed experts of the base itself, not of its head."""
    found = _FUSED.fullmatch(name) or _SINGLE.fullmatch(name)
    return found is not None and not name.startswith(HEAD_PREFIX)


def expert_matrices(
    infos: Iterable[TensorInfo], input_amax: Mapping[str, float]
) -> dict[str, list[ExpertMatrix]]:
    """The matrices in each tensor that holds trunk experts, by the tensor's name.

    Args:
        infos: all tensors of the checkpoint.
        input_amax: by module, `PREFIX.experts.gate_up_proj` or `….down_proj`; empty for W4A16.

    Raises:
        UserError: an expert without its other half, or stored in a dtype that is no plain one.
    """
    found = {info.name: info for info in infos if is_trunk_expert(info.name)}
    matrices: dict[str, list[ExpertMatrix]] = {}
    for name, info in found.items():
        if info.dtype not in UNQUANTIZED_DTYPES:
            raise UserError(
                "experts in BF16, F16 or F32", f"{name} of {info.dtype}", "use the base"
            )
        split = _of_fused(info) if _FUSED.fullmatch(name) else _single(info, found)
        matrices[name] = [
            ExpertMatrix(
                module=module, info=own, scaled_with=shared,
                input_amax=_input_amax(module, input_amax),
            )
            for module, own, shared in split
        ]  # fmt: skip
    return matrices


Part = tuple[str, TensorInfo, tuple[TensorInfo, ...]]


def _of_fused(info: TensorInfo) -> Iterator[Part]:
    """The experts of a 3-D tensor: [E, 2F, H] gate rows first, or [E, H, F]."""
    prefix, _, projection = info.name.rpartition(".")
    count, rows, _ = info.shape
    for expert in range(count):
        whole = _slice(info, expert * rows, rows)
        if projection == "down_proj":
            yield f"{prefix}.{expert}.down_proj", whole, (whole,)
            continue
        half = rows // 2
        for number, part in enumerate(("gate_proj", "up_proj")):
            own = _slice(info, expert * rows + number * half, half)
            yield f"{prefix}.{expert}.{part}", own, (whole,)


def _single(info: TensorInfo, found: Mapping[str, TensorInfo]) -> Iterator[Part]:
    module = info.name.removesuffix(".weight")
    expert, _, projection = module.rpartition(".")
    names = (projection,) if projection == "down_proj" else EXPERT_PROJECTIONS[:2]
    missing = [part for part in names if f"{expert}.{part}.weight" not in found]
    if missing:
        raise UserError(
            f"gate_proj and up_proj of {expert}, which share a scale",
            f"no {missing[0]}",
            "use a complete base",
        )
    yield module, info, tuple(found[f"{expert}.{part}.weight"] for part in names)


def _slice(info: TensorInfo, start: int, count: int) -> TensorInfo:
    """Some rows of a contiguous tensor, all leading dimensions taken as rows."""
    columns = info.shape[-1]
    row = info.nbytes // prod(info.shape[:-1])
    return replace(
        info, shape=(count, columns), offset=info.offset + start * row, nbytes=count * row
    )


def _input_amax(module: str, input_amax: Mapping[str, float]) -> float | None:
    if not input_amax:
        return None
    prefix, _, projection = module.rpartition(".")
    projection = projection if projection == "down_proj" else "gate_up_proj"
    return input_amax[f"{prefix.rpartition('.')[0]}.{projection}"]


@lru_cache(maxsize=1)  # its parts are written one after the other
def _packed(matrix: ExpertMatrix) -> dict[str, bytes]:
    amax = torch.stack([_largest(info) for info in matrix.scaled_with]).amax().reshape(1)
    if not amax.isfinite():
        raise UserError(
            f"finite values in the experts of {matrix.module}",
            "NaN or infinity",
            "use a whole base",
        )
    packed = pack(_load(matrix.info)[None], WeightScales(amax=amax))
    parts = {
        part: getattr(packed, part)[0].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for part in ("weight", "weight_scale", "weight_scale_2")
    }
    if matrix.input_amax is not None:
        scale = torch.tensor(matrix.input_amax, dtype=torch.float32) / (FP4_MAX * FP8_MAX)
        parts["input_scale"] = scale.numpy().tobytes()
    return parts


@lru_cache(maxsize=4)  # gate's and up's are asked for twice, close together
def _largest(info: TensorInfo) -> torch.Tensor:
    return largest(_load(info)[None])[0]


def _load(info: TensorInfo) -> torch.Tensor:
    with info.shard.open("rb") as file:
        file.seek(info.offset)
        raw = bytearray(file.read(info.nbytes))
    if len(raw) != info.nbytes:
        raise UserError(f"{info.shard} as it was", "a shorter file", "leave it alone, run again")
    return torch.frombuffer(raw, dtype=torch_dtype(info.dtype)).reshape(info.shape)
