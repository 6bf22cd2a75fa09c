"""A large base of dense random bytes, and a head for it: what the graft benchmarks work on.

    python benchmarks/graft/build_base.py --out /tmp/graft-bench --gigabytes 20

The layout is the tiny one of `tests/tiny.py` (so that the base is valid in every respect); the
bytes are blown up by extra expert-like trunk tensors in shards of about 5 GB. Random, not sparse:
a file system that finds zeros or repeats would make the copies look fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import write_base, write_tiny_head  # noqa: E402

from graft.index import INDEX_NAME, index_of, write_json  # noqa: E402
from graft.reader import TensorStore  # noqa: E402

TENSOR_BYTES = 64 * 1024 * 1024
BLOCK = 16 * 1024 * 1024


def write_dense_shard(path: Path, first: int, nbytes: int, generator: np.random.Generator) -> None:
    """Write one shard of BF16 tensors of 64 MiB; small finite values, random mantissas."""
    count = max(1, nbytes // TENSOR_BYTES)
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for number in range(first, first + count):
        name = f"model.language_model.ballast.{number}.weight"
        end = position + TENSOR_BYTES
        header[name] = {
            "dtype": "BF16", "shape": [TENSOR_BYTES // 8192, 4096],
            "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _ in range(count * TENSOR_BYTES // BLOCK):
            file.write(generator.bytes(BLOCK))
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    """Build `base` and `head` under --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--head-experts", type=int, default=256)
    parser.add_argument("--head-hidden", type=int, default=2048)
    options = parser.parse_args()
    base = options.out / "base"
    text = {
        "num_experts": options.head_experts, "hidden_size": options.head_hidden,
        "moe_intermediate_size": options.head_hidden // 4,
        "shared_expert_intermediate_size": options.head_hidden // 4,
    }  # fmt: skip
    write_base(base)
    set_sizes(base, text)
    generator = np.random.default_rng(0)
    number, left = 0, int(options.gigabytes * 1e9)
    while left > 0:
        size = min(left, 5_000_000_000)
        path = base / f"ballast-{number:05d}.safetensors"
        write_dense_shard(path, number * 1000, size, generator)
        number, left = number + 1, left - size
        print(path, path.stat().st_size, flush=True)
    store = TensorStore(sorted(base.glob("*.safetensors")))
    write_json(base / INDEX_NAME, index_of(store.infos(), {}))
    head = write_tiny_head(options.out / "head", base, form="nvfp4-modelopt")
    print(head, (head / "mtp.safetensors").stat().st_size)


def set_sizes(base: Path, text: dict[str, int]) -> None:
    """State the head's sizes in the config; the trunk's own tensors are never looked at."""
    config = json.loads((base / "config.json").read_text())
    config["text_config"].update(text)
    write_json(base / "config.json", config)


if __name__ == "__main__":
    main()
