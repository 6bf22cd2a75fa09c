"""NVFP4 packing of whole stacks of experts, bit for bit what modelopt writes.

modelopt's own export packs matrix by matrix through a `searchsorted` and a comparison of each value
with three bounds at once, which takes minutes for one full-size layer. Here experts are rows of one
matrix, taken in pieces that stay in a core's cache, and a code is the number of bounds that its
magnitude passed: seven comparisons, no search, no index. The arithmetic is modelopt's, operation
for operation, because the bytes must be: the order of two float32 operations moves codes.
(`NVFP4QTensor` of nvidia-modelopt 0.47; benchmarks/quantize/packing.py runs both.)

Shapes: E experts, R rows (out), C columns (in), blocks of 16 columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from graft.errors import UserError
from graft.formats import NVFP4_BLOCK, NVFP4_CODES

FP4_MAX, FP8_MAX, SMALLEST_FP8 = 6.0, 448.0, 2.0**-9
# A magnitude's code is how many of these it passes. Between two codes lies their mean, and a tie
# goes to the even one: up past every second bound, down at the others.
BOUNDS_UP = (0.75, 1.75, 3.5)
BOUNDS_DOWN = (0.25, 1.25, 2.5, 5.0)
PIECE = {"cpu": 2**18, "cuda": 2**26}  # values at once
AMAX_OF_ZEROS = 1.0
"""Stands for the largest magnitude of an all-zero expert: any scale dequantizes it to zeros, while
modelopt's own is 0 / 0."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Packed experts.

    weight: uint8 [E, R, C/2]; weight_scale: float8_e4m3fn [E, R, C/16]; weight_scale_2: float32 [E]
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor

    def rows(self, start: int, stop: int) -> Packed:
        """The same rows of every expert: gate or up of a fused pair, with the pair's scale."""
        return Packed(
            weight=self.weight[:, start:stop],
            weight_scale=self.weight_scale[:, start:stop],
            weight_scale_2=self.weight_scale_2,
        )


@dataclass(frozen=True, kw_only=True)
class WeightScales:
    """What calibration says of E experts' matrices.

    amax: float32 [E], the largest magnitude that a tensor scale stands for.
    block_amax: float32 [E, R, C/16] where an algorithm chose the block scales; else they follow
        from the weights.
    scale_max: the block scale that `amax` gets; below 448 an algorithm may raise a block's own.
    """

    amax: torch.Tensor
    block_amax: torch.Tensor | None = None
    scale_max: float = FP8_MAX


def largest(weight: torch.Tensor) -> torch.Tensor:
    """[E, R, C] -> float32 [E], the largest magnitude of each expert; NaN where one is."""
    flat = weight.flatten(1)
    return torch.maximum(flat.amax(1), -flat.amin(1)).float()


def pack(weight: torch.Tensor, scales: WeightScales) -> Packed:
    """Pack a stack of experts.

    Args:
        weight: bfloat16 or float32 [E, R, C], C a multiple of 16.
        scales: of the same experts. Gate and up of one expert must share theirs, so they are
            packed as one matrix, or with the larger of both.

    Raises:
        UserError: a value that is not finite, or columns that fill no blocks.
    """
    experts, rows, columns = weight.shape
    if columns % NVFP4_BLOCK:
        raise UserError(
            f"expert matrices of a multiple of {NVFP4_BLOCK} columns", str(columns), "keep it BF16"
        )
    device = weight.device
    amax = scales.amax.to(device).float()
    amax = torch.where(amax == 0, AMAX_OF_ZEROS, amax)
    scale_2 = amax / (FP4_MAX * scales.scale_max)
    packed = torch.empty(experts * rows, columns // 2, dtype=torch.uint8, device=device)
    block_scale = torch.empty(
        experts * rows, columns // NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=device
    )
    flat = weight.reshape(experts * rows, columns)
    row_scale = scale_2.repeat_interleave(rows).unsqueeze(-1)
    row_amax = amax.repeat_interleave(rows).unsqueeze(-1)
    chosen = scales.block_amax
    if chosen is not None:
        chosen = chosen.to(device).float().reshape(block_scale.shape)
    for piece in _pieces(flat):
        blocks = flat[piece].float().unflatten(-1, (-1, NVFP4_BLOCK))
        magnitude = blocks.abs()
        own = magnitude.amax(-1)
        if not own.isfinite().all():
            raise UserError("finite expert weights", "NaN or infinity", "look at the training run")
        if chosen is None:
            scale = _block_scale(own, row_scale[piece])
        else:
            scale = _chosen_block_scale(chosen[piece], row_amax[piece], scales.scale_max)
        block_scale[piece] = scale
        scaled = blocks / (scale.float() * row_scale[piece]).unsqueeze(-1)
        codes = fp4_codes(scaled, out=magnitude)
        # Little-endian pairs: the even column's code is the low byte, the odd one's the high.
        pairs = codes.flatten(1).view(torch.int16)
        packed[piece] = (pairs | pairs >> 4).to(torch.uint8)
    return Packed(
        weight=packed.reshape(experts, rows, columns // 2),
        weight_scale=block_scale.reshape(experts, rows, columns // NVFP4_BLOCK),
        weight_scale_2=scale_2,
    )


def fake_quantize(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """What `values` [..., C] become when they are packed and dequantized, in their own dtype.

    Weights and activations alike; `amax` [] is the tensor's.
    """
    scale_2 = torch.where(amax == 0, AMAX_OF_ZEROS, amax.float()) / (FP4_MAX * FP8_MAX)
    blocks = values.float().unflatten(-1, (-1, NVFP4_BLOCK))
    step = (_block_scale(blocks.abs().amax(-1), scale_2).float() * scale_2).unsqueeze(-1)
    signed = torch.tensor([*NVFP4_CODES, *(-code for code in NVFP4_CODES)], device=values.device)
    return (signed[fp4_codes(blocks / step).int()] * step).flatten(-2).to(values.dtype)


def fp4_codes(scaled: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """FP4 codes, sign << 3 | magnitude, of values in units of their step; uint8.

    `out` is memory of the shape of `scaled` to work in.
    """
    magnitude = torch.abs(scaled, out=out)
    codes = (scaled < 0).view(torch.uint8) << 3
    for bound in BOUNDS_DOWN:
        codes += (magnitude > bound).view(torch.uint8)
    for bound in BOUNDS_UP:
        codes += (magnitude >= bound).view(torch.uint8)
    return codes


def _block_scale(block_amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """FP8 scales of blocks from their largest magnitudes; 1 for a block of zeros."""
    scale = block_amax / (FP4_MAX * scale_2)
    scale[scale == 0] = 1.0
    return scale.clamp_(SMALLEST_FP8, FP8_MAX).to(torch.float8_e4m3fn)


def _chosen_block_scale(
    block_amax: torch.Tensor, amax: torch.Tensor, scale_max: float
) -> torch.Tensor:
    """FP8 scales of blocks whose amax an algorithm chose."""
    scale = block_amax / FP4_MAX
    scale[scale == 0] = 1.0
    scale = scale * scale_max / (amax / FP4_MAX)
    return scale.clamp_(SMALLEST_FP8, FP8_MAX).to(torch.float8_e4m3fn)


def _pieces(flat: torch.Tensor) -> Iterator[slice]:
    values = PIECE.get(flat.device.type, PIECE["cuda"])
    step = max(1, values // flat.shape[1])
    for start in range(0, flat.shape[0], step):
        yield slice(start, start + step)
