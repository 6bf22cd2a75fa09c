"""The numbers in stored tensors, with numpy alone.

Planning and writing a graft look at values only to check them, and importing torch for that would
cost 220 MB and four seconds (more with a CUDA build). numpy lacks the short floats, but each is a
float32 or float16 with bits cut off, or has 256 values that fit a table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def float_values(raw: bytes, dtype: str) -> NDArray[np.floating]:
    """Decode the bytes of a floating-point tensor, exactly.

    Args:
        raw: whole elements, little-endian.
        dtype: as safetensors spells it, one of `FLOAT_DTYPES`.

    Returns:
        float64, float32 or float16 [elements], never narrower than `dtype`.
    """
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    if dtype == "F8_E5M2":
        return (np.frombuffer(raw, "u1").astype("<u2") << 8).view("<f2")
    if dtype == "F8_E4M3":
        return _E4M3[np.frombuffer(raw, "u1")]
    return np.frombuffer(raw, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])


def _e4m3_table() -> NDArray[np.float32]:
    """All float8_e4m3fn values: bias 7, no infinities, NaN where all bits but the sign are set."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 0xF, codes & 0x7
    values = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


_E4M3 = _e4m3_table()
