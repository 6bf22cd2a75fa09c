"""NVFP4 packing of whole stacks of experts, bit for bit what modelopt writes.

modelopt's own export packs matrix by matrix through a `searchsorted` and a comparison of each value
with three bounds at once. Here experts are rows of one matrix, taken in pieces that stay in a
core's cache, and a code is the least of three roundings: no search, no comparison, no index. Scales
are modelopt's arithmetic, operation for operation, because the bytes must be: the order of two
float32 operations moves codes.
(`NVFP4QTensor` of nvidia-modelopt 0.47; benchmarks/quantize/packing.py runs both.)

Shapes: E experts, R rows (out), C columns (in), blocks of 16 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from graft.errors import UserError
from graft.formats import NVFP4_BLOCK, NVFP4_CODES

FP4_MAX, FP8_MAX, SMALLEST_FP8 = 6.0, 448.0, 2.0**-9
LARGEST_CODE = 7
BITS_OF_INFINITY = 0x7F800000  # float32; NaNs lie above
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
    flat = weight.reshape(experts * rows, columns)
    row_scale = scale_2.repeat_interleave(rows).unsqueeze(-1)
    row_amax = amax.repeat_interleave(rows).unsqueeze(-1)
    packed = torch.empty(experts * rows, columns // 2, dtype=torch.uint8, device=device)
    block_scale = torch.empty(
        experts * rows, columns // NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=device
    )
    chosen = scales.block_amax
    if chosen is not None:
        chosen = chosen.to(device).float().reshape(block_scale.shape)

    def pack_pieces(pieces: list[slice]) -> None:
        scratch = _Scratch.of(flat[pieces[0]])
        for piece in pieces:
            values = scratch.values[: flat[piece].shape[0]].copy_(flat[piece])
            own = _block_amax(values, scratch)
            if chosen is None:
                scale = _block_scale(own, row_scale[piece])
            else:
                scale = _chosen_block_scale(chosen[piece], row_amax[piece], scales.scale_max)
            block_scale[piece] = scale
            step = (scale.float() * row_scale[piece]).unsqueeze(-1)
            values.unflatten(-1, (-1, NVFP4_BLOCK)).div_(step)
            # Little-endian pairs: the even column's code is the low byte, the odd one's the high.
            pairs = fp4_codes(values, scratch).view(torch.int16)
            packed[piece] = (pairs | pairs >> 4).to(torch.uint8)

    _in_threads(pack_pieces, list(_pieces(flat)), device)
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


@dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Memory that a thread works in: fresh memory costs more than the arithmetic on it."""

    values: torch.Tensor
    magnitude: torch.Tensor
    rounded: torch.Tensor
    other: torch.Tensor
    codes: torch.Tensor

    @classmethod
    def of(cls, like: torch.Tensor) -> _Scratch:
        floats = [torch.empty(like.shape, device=like.device) for _ in range(4)]
        codes = torch.empty(like.shape, dtype=torch.int8, device=like.device)
        values, magnitude, rounded, other = floats
        return cls(values=values, magnitude=magnitude, rounded=rounded, other=other, codes=codes)


def fp4_codes(scaled: torch.Tensor, scratch: _Scratch | None = None) -> torch.Tensor:
    """FP4 codes, sign << 3 | magnitude, of values in units of their step; int8.

    With steps of a half up to 2, of 1 up to 4 and of 2 up to 6, the code of a magnitude m is the
    least of round(2m), round(m) + 2 and round(m / 2) + 4: torch rounds ties to even, and even codes
    are the even multiples on each stretch. -0 has the code of 0.

    Args:
        scaled: float32, at least 1-D; overwritten.
        scratch: of at least as many rows.
    """
    scratch = scratch or _Scratch.of(scaled)
    rows = scaled.shape[0]
    magnitude = torch.abs(scaled, out=scratch.magnitude[:rows])
    negative = scaled.sign_().clamp_(max=0)  # -1 or 0
    code = torch.mul(magnitude, 2, out=scratch.rounded[:rows]).round_()
    other = torch.round(magnitude, out=scratch.other[:rows]).add_(2)
    torch.minimum(code, other, out=code)
    torch.minimum(code, magnitude.mul_(0.5).round_().add_(4), out=code)
    code.clamp_(max=LARGEST_CODE).sub_(negative, alpha=8)
    return scratch.codes[:rows].copy_(code)


def _block_amax(values: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
    """[R, C] -> [R, C/16] largest magnitudes, by the order of their bits, which is that of
    magnitudes and quicker to compare.

    Raises:
        UserError: a value that is not finite.
    """
    magnitude = torch.abs(values, out=scratch.magnitude[: values.shape[0]])
    bits = magnitude.view(torch.int32).unflatten(-1, (-1, NVFP4_BLOCK)).amax(-1)
    if bits.amax() >= BITS_OF_INFINITY:
        raise UserError("finite expert weights", "NaN or infinity", "look at the training run")
    return bits.view(torch.float32)


def _block_scale(block_amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """FP8 scales of blocks from their largest magnitudes; 1 for a block of zeros."""
    scale = block_amax / (FP4_MAX * scale_2)
    scale = torch.where(scale == 0, 1.0, scale)
    return scale.clamp_(SMALLEST_FP8, FP8_MAX).to(torch.float8_e4m3fn)


def _chosen_block_scale(
    block_amax: torch.Tensor, amax: torch.Tensor, scale_max: float
) -> torch.Tensor:
    """FP8 scales of blocks whose amax an algorithm chose."""
    scale = block_amax / FP4_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    scale = scale * scale_max / (amax / FP4_MAX)
    return scale.clamp_(SMALLEST_FP8, FP8_MAX).to(torch.float8_e4m3fn)


def _in_threads(
    work: Callable[[list[slice]], None], pieces: list[slice], device: torch.device
) -> None:
    """Do the pieces, on a CPU each thread its own: torch's threads would meet after every
    operation, which on busy cores takes longer than the operation."""
    num_threads = min(torch.get_num_threads(), len(pieces))
    if device.type != "cpu" or num_threads < 2:
        work(pieces)
        return
    shares = [pieces[start::num_threads] for start in range(num_threads)]
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as p:
            list(p.map(work, shares))
    finally:
        torch.set_num_threads(before)  # which threads that are still to come will have


def _pieces(flat: torch.Tensor) -> Iterator[slice]:
    """Rows at once, the most first: what a thread's scratch is made for."""
    values = PIECE.get(flat.device.type, PIECE["cuda"])
    step = max(1, values // flat.shape[1])
    for start in range(0, flat.shape[0], step):
        yield slice(start, start + step)
