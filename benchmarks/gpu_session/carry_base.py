"""A small BF16 base as one file that travels: 41 MB of 57, so that it fits a call with the wheels.

    python carry_base.py pack BASE FOLDER      # then carry FOLDER
    python carry_base.py unpack FOLDER BASE

High and low bytes apart: exponents compress to a third, mantissas not at all.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import numpy as np


def pack(base: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    index, parts = [], []
    for path in sorted(base.iterdir()):
        data = np.frombuffer(path.read_bytes(), np.uint8)
        low, high = zlib.compress(data[0::2].tobytes(), 1), zlib.compress(data[1::2].tobytes(), 9)
        index.append([path.name, len(data), len(low), len(high)])
        parts += [low, high]
    (folder / "base.bin").write_bytes(b"".join(parts))
    (folder / "base.json").write_text(json.dumps(index))


def unpack(folder: Path, base: Path) -> None:
    base.mkdir(parents=True, exist_ok=True)
    packed, place = (folder / "base.bin").read_bytes(), 0
    for name, size, low, high in json.loads((folder / "base.json").read_text()):
        data = np.empty(size, np.uint8)
        for first, length in ((0, low), (1, high)):
            data[first::2] = np.frombuffer(
                zlib.decompress(packed[place : place + length]), np.uint8
            )
            place += length
        (base / name).write_bytes(data.tobytes())


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
