"""Short floats decoded with numpy, against torch over every code there is."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from graft.reader import torch_dtype
from graft.values import FLOAT_DTYPES, float_values


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_code_decodes_as_in_torch(dtype):
    width = torch_dtype(dtype).itemsize
    generator = np.random.default_rng(0)
    codes = {1: np.arange(256, dtype="u1"), 2: np.arange(65536, dtype="<u2")}.get(width)
    raw = generator.bytes(65536) if codes is None else codes.tobytes()
    wanted = torch.frombuffer(bytearray(raw), dtype=torch_dtype(dtype)).double().numpy()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        found = float_values(raw, dtype).astype(np.float64)
    assert np.array_equal(wanted, found, equal_nan=True)
    assert np.array_equal(np.signbit(wanted[wanted == 0]), np.signbit(found[wanted == 0]))


def test_a_graft_is_planned_and_written_without_torch():
    """Importing torch alone takes most of the 300 MB that a graft may use."""
    program = "import sys, graft.plan, graft.writer, graft.verify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
