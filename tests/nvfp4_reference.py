"""NVFP4 written out in plain Python, value by value: OCP MX FP4 and modelopt's scales."""

from __future__ import annotations

import torch

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Matrix = tuple[torch.Tensor, list[float], torch.Tensor]  # bytes, block scales, tensor scale


def nearest_code(value: float) -> int:
    """Index of the nearest FP4 magnitude; a tie goes to the even code."""
    distances = [abs(abs(value) - candidate) for candidate in VALUES]
    best = min(distances)
    codes = [code for code, distance in enumerate(distances) if distance == best]
    return next((code for code in codes if code % 2 == 0), codes[0]) | (8 if value < 0 else 0)


def pack_in_python(weight: torch.Tensor, amax: float) -> Matrix:
    """One matrix to (packed bytes, block scales, tensor scale)."""
    scale_2 = torch.tensor(amax / (6 * 448), dtype=torch.float32)
    packed, scales = [], []
    for row in weight.float():
        codes: list[int] = []
        for block in row.split(16):
            raw = block.abs().max() / (6 * scale_2)
            scale = raw.clamp(2**-9, 448) if block.abs().max() else torch.tensor(1.0)
            scale = scale.to(torch.float8_e4m3fn).float()
            scales.append(scale.item())
            codes += [nearest_code(value.item()) for value in block / (scale * scale_2)]
        packed.append([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
    return torch.tensor(packed, dtype=torch.uint8), scales, scale_2
