"""Memory of one training row against its length, up to 32,768 tokens, on a CPU at a small size.

Forward and backward of a four-layer head (hidden size 32, vocabulary 1024) on one row, all tokens
supervised. Memory is what torch's operators made and not yet freed (tests/live_memory.py); what the
row itself needs at other sizes scales with hidden size and layers, so the number to look at is how
it grows. Prints one JSON object a line.

    OMP_NUM_THREADS=1 python benchmarks/long_rows/measure.py > rows.jsonl
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from live_memory import long_row_draft, memory_of_a_step
from random_bases import save_random_base

VOCABULARY = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--runtimes", nargs="+", default=["routed", "stock"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        base = save_random_base(
            Path(folder) / "base", vocab_size=VOCABULARY, layer_types=["full_attention"]
        )
        for runtime in options.runtimes:
            for checkpointing in (True, False):
                draft = long_row_draft(base, runtime=runtime, checkpointing=checkpointing)
                for length in options.lengths:
                    started = time.monotonic()
                    memory = memory_of_a_step(draft, length, VOCABULARY)
                    record = {
                        "runtime": runtime,
                        "activation_checkpointing": checkpointing,
                        "tokens": length,
                        "peak_bytes": memory.peak,
                        "peak_bytes_per_token": round(memory.peak / length, 1),
                        "largest_tensor_bytes": memory.largest[0],
                        "largest_tensor_shape": list(memory.largest[1]),
                        "seconds": round(time.monotonic() - started, 1),
                    }
                    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
