"""Peak memory of calibrating, packing and writing a head, against the size of that head.

    python benchmarks/quantize/memory.py > OUT.json

A random head of 4 layers, half the width of the 35B's and a quarter of its experts, and random
states in the base's place, so that what is measured is the head's own: resident bytes at the peak
(VmHWM, reset before) less those before. The bound is the BF16 head and one layer of it in float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from graft.layout import head_tensor_shapes
from graft.manifest import HeadFolder, head_metadata, write_head
from quantize.calibration import calibrate, quiet
from quantize.experts import calibrate_head, pack_head
from quantize.layerwise import load_layer

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "attn_output_gate": True,
    "layer_types": ["full_attention"], "num_experts_per_tok": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [6, 5, 5]},
}  # fmt: skip


class RandomStates:
    """In the base's place: states and embeddings from a generator."""

    def __init__(self, hidden: int) -> None:
        self.device = torch.device("cpu")
        self.lm_head = torch.zeros(1, hidden)

    def hidden(self, row: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(row[0, 0]))
        return torch.randn(*row.shape, self.lm_head.shape[1], generator=generator)

    embed = hidden


def write_random_head(folder: Path, config: dict[str, Any]) -> int:
    """A BF16 head; returns its bytes."""
    shapes = head_tensor_shapes(config, 4, "fused")
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    metadata = head_metadata(
        num_layers=4, form="bf16-fused", text_config=config, base_fingerprint={}, provenance={}
    )
    write_head(folder, tensors, metadata)
    return sum(tensor.nbytes for tensor in tensors.values())


def resident(key: str) -> int:
    """Bytes of VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = TEXT_CONFIG | {
        "hidden_size": options.hidden, "num_experts": options.experts,
        "moe_intermediate_size": options.width, "shared_expert_intermediate_size": options.width,
    }  # fmt: skip
    teacher: Any = RandomStates(options.hidden)
    rows = [torch.full((1, 512), n) for n in range(max(options.tokens // 512, 1))]
    with tempfile.TemporaryDirectory() as work:
        # A small head first: what modelopt and transformers load stays, and is not the head's.
        small = config | {"hidden_size": 64, "moe_intermediate_size": 16, "num_experts": 8}
        write_random_head(Path(work) / "small", small)
        layer = load_layer(HeadFolder(Path(work) / "small"), 0, teacher.device, "eager")
        with quiet():
            calibrate(layer, lambda _: None, "w4a16")
        del layer
        head_bytes = write_random_head(Path(work) / "head", config)
        source = HeadFolder(Path(work) / "head")
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        scales, _ = calibrate_head(source, teacher, rows, "w4a4", num_steps=4, runtime="routed")
        calibrated = resident("VmHWM")
        tensors = pack_head(source, scales)
        (Path(work) / "out").mkdir()
        write_head(Path(work) / "out", tensors, source.metadata | {"form": "nvfp4-modelopt"})
        peak = resident("VmHWM")
    layer_bytes = sum(
        2 * info.nbytes for info in source.infos() if info.name.startswith("mtp.layers.0.")
    )
    bound = head_bytes + layer_bytes
    report = {
        "schema_version": 1, **{key: getattr(options, key) for key in vars(options)},
        "head_bytes": head_bytes, "layer_bytes_float32": layer_bytes,
        "grown_by_calibration": calibrated - before, "grown_in_all": peak - before,
        "bound": bound, "share_of_bound": (peak - before) / bound, "torch": torch.__version__,
    }  # fmt: skip
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
