"""The benchmark of training at real shapes: FLOPs as torch counts them, and a step that runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "train_shapes"))
from shapes import NUM_LAYERS, REAL, TINY, step_flops, weights_per_token

from graft.layout import head_tensor_shapes
from mtp.head import MTPHead

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "train_shapes"
ROWS, LENGTH = 2, 24


@pytest.fixture(scope="module")
def counted():
    """Forward FLOPs of the chain by torch's own counter: of products with weights, of attention."""
    torch.manual_seed(0)
    head = MTPHead(TINY, NUM_LAYERS, "eager")
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    hidden, embeddings = torch.randn(2, ROWS, LENGTH, TINY["hidden_size"])

    def count(backend):
        with torch.no_grad(), sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
            head.chain(hidden, embeddings)
        return counter.get_total_flops()

    products = count(SDPBackend.FLASH_ATTENTION)  # whose own FLOPs torch does not know on a CPU
    return products, count(SDPBackend.MATH) - products


def test_products_with_weights_are_what_torch_counts(counted):
    positions = ROWS * sum(LENGTH - 1 - k for k in range(NUM_LAYERS))
    assert counted[0] == 2 * positions * weights_per_token(TINY)


def test_attention_is_the_causal_half_of_what_torch_counts(counted):
    """torch counts the square that causal attention does not compute: W^2 for W (W+1) / 2."""
    flops = step_flops(TINY, rows=ROWS, length=LENGTH, num_steps=NUM_LAYERS)
    causal = flops.layers // 3 - counted[0]
    windows = [LENGTH - 1 - k for k in range(NUM_LAYERS)]
    half, square = sum(w * (w + 1) // 2 for w in windows), sum(w * w for w in windows)
    assert causal * square == counted[1] * half


def test_the_real_head_has_the_size_that_its_layout_says():
    sizes = {name: torch.Size(shape).numel() for name, shape in head_tensor_shapes(REAL, 1).items()}
    in_every_product = sum(
        size for name, size in sizes.items() if "norm" not in name and ".experts." not in name
    )
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    share = REAL["num_experts_per_tok"] / REAL["num_experts"]
    assert weights_per_token(REAL) == in_every_product + routed * share


def test_logits_count_twice_for_the_head_and_once_for_the_base():
    flops = step_flops(REAL, rows=3, length=100, num_steps=NUM_LAYERS)
    one = 2 * REAL["hidden_size"] * REAL["vocab_size"]
    assert flops.teacher_logits == 3 * 98 * one
    assert flops.student_logits == 2 * 3 * (98 + 97 + 96 + 95) * one
    without = step_flops(REAL, rows=3, length=100, num_steps=NUM_LAYERS, with_teacher=False)
    assert without.total == flops.total - flops.teacher_logits


def test_a_tiny_step_runs_and_reports(tmp_path):
    out = tmp_path / "cases.jsonl"
    command = [
        sys.executable, str(BENCHMARK / "step.py"), "--name", "tiny", "--tiny", "--tokens", "64",
        "--length", "32", "--warm-up", "1", "--steps", "1", "--loss", "e2e_tv", "--out", str(out),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, cwd=BENCHMARK.parents[1])
    case = json.loads(out.read_text())
    assert case["schema_version"] == 1 and case["tokens_per_step"] == 64
    assert case["tokens_per_second"] > 0 and len(case["losses"]) == 2
