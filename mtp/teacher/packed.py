"""Stored weights, whatever they are packed in, as plain ones: a table of schemes.

A quantized base says in two places what it is: in its config, and in its tensors. Values are
taken from the tensors alone, because configs in the wild contradict themselves and because names
and dtypes leave no doubt. What no row of the table explains is refused by name, never skipped.

Activation scales (`input_scale`, ...) are read by nobody here: a dequantized base computes with
unquantized activations, as W4A16 serving does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graft.errors import UserError
from graft.formats import NVFP4_BLOCK, dequantize_nvfp4, quantization_blocks
from graft.reader import HEAD_PREFIX, Checkpoint

PLAIN_DTYPES = ("BF16", "F16", "F32")
# Scales of activations and of the KV cache: they change no weight.
UNUSED_SCALES = ("input_scale", "input_global_scale", "q_scale", "k_scale", "v_scale")
NOT_THE_TRUNK = (HEAD_PREFIX, "model.visual.", "visual.")
DEFAULT_FP8_BLOCK = (128, 128)
Block = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one matrix is packed: a packed tensor of a dtype, and its scales.

    unpack: ([packed, *scales], block) -> float32 [out, in]; block is that of FP8 block scales.
    """

    name: str
    packed: str
    dtype: str
    scales: tuple[str, ...]
    unpack: Callable[[list[torch.Tensor], Block], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """One weight of the trunk under the name it has unpacked (`….weight`), and how to read it."""

    name: str
    tensors: tuple[str, ...]
    scheme: Scheme | None


def _nvfp4(parts: list[torch.Tensor], _: Block) -> torch.Tensor:
    packed, scale, tensor_scale = parts
    _require(scale.shape == (packed.shape[0], packed.shape[1] * 2 // NVFP4_BLOCK))
    return dequantize_nvfp4(packed, scale, tensor_scale.reshape(()))


def _nvfp4_reciprocal(parts: list[torch.Tensor], block: Block) -> torch.Tensor:
    packed, scale, reciprocal = parts
    return _nvfp4([packed, scale, 1 / reciprocal.float()], block)


def _fp8_block(parts: list[torch.Tensor], block: Block) -> torch.Tensor:
    weight, scale = parts
    rows, columns = weight.shape
    _require(scale.shape == (-(-rows // block[0]), -(-columns // block[1])))
    spread = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * spread[:rows, :columns]


def _fp8_tensor_or_channel(parts: list[torch.Tensor], _: Block) -> torch.Tensor:
    weight, scale = parts
    _require(scale.numel() in (1, weight.shape[0]))
    return weight.float() * scale.float().reshape(-1, 1)


SCHEMES = (
    Scheme(name="modelopt NVFP4", packed="weight", dtype="U8",
           scales=("weight_scale", "weight_scale_2"), unpack=_nvfp4),
    Scheme(name="compressed-tensors NVFP4", packed="weight_packed", dtype="U8",
           scales=("weight_scale", "weight_global_scale"), unpack=_nvfp4_reciprocal),
    Scheme(name="FP8 in blocks", packed="weight", dtype="F8_E4M3",
           scales=("weight_scale_inv",), unpack=_fp8_block),
    Scheme(name="FP8 by tensor or channel", packed="weight", dtype="F8_E4M3",
           scales=("weight_scale",), unpack=_fp8_tensor_or_channel),
)  # fmt: skip
_SCALES = {scale for scheme in SCHEMES for scale in scheme.scales}


def stored_weights(checkpoint: Checkpoint) -> list[StoredWeight]:
    """Every weight of the trunk, in the order of the files; head and vision tower left out.

    Raises:
        UserError: a tensor that no scheme explains.
    """
    found: list[StoredWeight] = []
    claimed: set[str] = set()
    scales: list[str] = []
    for name in checkpoint.names:
        module, _, kind = name.rpartition(".")
        if name.startswith(NOT_THE_TRUNK) or kind in UNUSED_SCALES:
            continue
        if kind in _SCALES:
            scales.append(name)
            continue
        dtype = checkpoint.info(name).dtype
        if dtype in PLAIN_DTYPES:
            found.append(StoredWeight(name=name, tensors=(name,), scheme=None))
            continue
        scheme = _scheme_of(checkpoint, name)
        parts = tuple(f"{module}.{scale}" for scale in scheme.scales)
        claimed.update(parts)
        found.append(StoredWeight(name=f"{module}.weight", tensors=(name, *parts), scheme=scheme))
    if strays := [name for name in scales if name not in claimed]:
        raise _unexplained(checkpoint, strays[0], "a scale of no packed weight")
    return found


def is_packed(checkpoint: Checkpoint) -> bool:
    """Whether any weight of the trunk needs unpacking."""
    return any(weight.scheme is not None for weight in stored_weights(checkpoint))


def load_weight(
    checkpoint: Checkpoint, weight: StoredWeight, device: torch.device, block: Block
) -> torch.Tensor:
    """One weight, plain in its stored dtype or unpacked in float32, on `device`.

    Raises:
        UserError: scales whose shapes do not fit the packed matrix.
    """
    parts = [checkpoint.load(name).to(device) for name in weight.tensors]
    if weight.scheme is None:
        return parts[0]
    try:
        return weight.scheme.unpack(parts, block)
    except ValueError as error:
        shapes = ", ".join(
            f"{n} {list(p.shape)}" for n, p in zip(weight.tensors, parts, strict=True)
        )
        raise UserError(
            f"a matrix in {weight.scheme.name} with scales that fit it",
            f"{shapes} in {checkpoint.folder}",
            "use a checkpoint in a layout that vLLM loads, one matrix a tensor",
        ) from error


def fp8_block(checkpoint: Checkpoint) -> Block:
    """Rows and columns that share an FP8 block scale, from the config."""
    block, _ = quantization_blocks(checkpoint)
    stated = (block or {}).get("weight_block_size") or DEFAULT_FP8_BLOCK
    return int(stated[0]), int(stated[1])


def find_weight(checkpoint: Checkpoint, name: str) -> StoredWeight:
    """The weight that unpacks to `name`; UserError if the trunk has none."""
    module, _, kind = name.rpartition(".")
    for packed in (name, f"{module}.weight_packed"):
        if packed in checkpoint and kind == "weight":
            if checkpoint.info(packed).dtype in PLAIN_DTYPES:
                return StoredWeight(name=name, tensors=(packed,), scheme=None)
            scheme = _scheme_of(checkpoint, packed)
            parts = tuple(f"{module}.{scale}" for scale in scheme.scales)
            return StoredWeight(name=name, tensors=(packed, *parts), scheme=scheme)
    raise UserError(f"{name} in {checkpoint.folder}", "no such weight", "use a complete checkpoint")


def _scheme_of(checkpoint: Checkpoint, name: str) -> Scheme:
    module, _, kind = name.rpartition(".")
    info = checkpoint.info(name)
    for scheme in SCHEMES:
        named = scheme.packed == kind and scheme.dtype == info.dtype and len(info.shape) == 2
        if named and all(f"{module}.{scale}" in checkpoint for scale in scheme.scales):
            return scheme
    raise _unexplained(checkpoint, name, f"{info.dtype} {list(info.shape)}")


def _unexplained(checkpoint: Checkpoint, name: str, what: str) -> UserError:
    return UserError(
        f"weights in BF16, F16, F32, or packed as {', '.join(s.name for s in SCHEMES)}",
        f"{name} ({what}) in {checkpoint.folder}",
        "use a base in one of these, or its unquantized original",
    )


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError("shapes do not fit")
