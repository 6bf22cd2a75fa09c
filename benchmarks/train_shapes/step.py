"""Optimizer steps of `mtp train` at the 35B's shapes, hidden states cached: speed, memory, MFU.

    python benchmarks/train_shapes/step.py --name NAME [options] --out OUT.jsonl

The step is `mtp.train.optimizer_step` itself on the real `MTPDraft`; weights, hidden states and
tokens are random. Hidden states lie in host memory as the cache's do, and are put together and
copied for each micro-batch as `CachedSource` does. `--tiny` rehearses all of it on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import gpu
from shapes import NUM_LAYERS, REAL, TINY, step_flops

import mtp.draft
import mtp.losses.fused
from mtp.data.batches import Batch
from mtp.draft import MTPDraft
from mtp.experts import EXPERTS
from mtp.head import MTPHead
from mtp.optimizer import build_optimizers
from mtp.parallel import start_processes
from mtp.recipe import LossRecipe, Recipe, TrainRecipe
from mtp.teacher.source import base_autocast
from mtp.train import Setup, TrainState, optimizer_step

# Loss terms by the option's name; "recipe" is what a recipe has when it says nothing.
LOSSES: dict[str, dict[str, float]] = {
    "recipe": {},
    "kl": {"kl": 1.0, "ce": 0.0},
    "ce": {"kl": 0.0, "ce": 1.0},
    "lk": {"kl": 0.0, "ce": 0.0, "lk": 1.0},
    "e2e_tv": {"kl": 0.0, "ce": 0.0, "e2e_tv": 1.0},
}


class RandomSource:
    """A `HiddenSource` of random states in host memory; logits spread about as a model's do."""

    def __init__(
        self, config: dict[str, Any], rows: int, length: int, device: torch.device
    ) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = (config["vocab_size"], config["hidden_size"])
        self.embedding = torch.randn(size, device=device, dtype=self.dtype) * 0.02
        self.lm_head = torch.randn(size, device=device, dtype=self.dtype) * 4 / size[1] ** 0.5
        self._states = torch.randn(rows, length, size[1], device=device).bfloat16().cpu()

    def autocast(self) -> torch.autocast:
        return base_autocast(self.device, self.dtype)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids.to(self.device), self.embedding)

    def batch_hidden(self, batch: Batch) -> torch.Tensor:
        hidden = torch.zeros(
            *batch.input_ids.shape, self.lm_head.shape[1],
            dtype=torch.bfloat16, pin_memory=self.device.type == "cuda",
        )  # fmt: skip
        for target, row, length in zip(hidden, batch.rows, batch.lengths, strict=True):
            target[:length] = self._states[row][:length]
        return hidden.to(self.device, self.dtype, non_blocking=True)


@dataclass
class RandomBatches:
    """Stands for `StepBatches`: the same full rows of random tokens, all supervised, every step."""

    vocabulary: int
    length: int
    rows_per_micro_batch: int
    accumulation: int

    def micro_batches(self, step: int) -> list[Batch]:
        shape = (self.rows_per_micro_batch, self.length)
        return [
            Batch(
                input_ids=torch.randint(0, self.vocabulary, shape),
                loss_mask=torch.ones(shape, dtype=torch.bool),
                lengths=torch.full((shape[0],), self.length),
                categories=("random",) * shape[0],
                rows=tuple(range(shape[0])),
            )
            for _ in range(self.accumulation)
        ]

    def num_tokens(self, step: int) -> int:
        return self.rows_per_micro_batch * self.length * self.accumulation


def build(options: argparse.Namespace, device: torch.device) -> Setup:
    """The trainer's own parts, of random weights."""
    config = TINY if options.tiny else REAL
    torch.manual_seed(0)
    rows = options.tokens // options.length
    recipe = Recipe(
        loss=LossRecipe(**LOSSES[options.loss]),
        train=TrainRecipe(
            optimizer=options.optimizer, activation_checkpointing=options.checkpointing
        ),
    )
    with device:
        head = MTPHead(config, NUM_LAYERS, options.experts).float()
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    source = RandomSource(config, rows, options.length, device)
    draft = MTPDraft(head, source, recipe, None, {})  # type: ignore[arg-type]
    if options.compile:
        for layer in head.layers:
            layer.compile(dynamic=False)
    accelerator = start_processes(device, None, Path())
    return Setup(
        recipe=recipe, draft=draft, model=draft, optimizers=build_optimizers(draft, recipe.train),
        batches=RandomBatches(config["vocab_size"], options.length, rows, options.accumulation),
        rows=None, run=None, accelerator=accelerator, provenance={},
    )  # type: ignore[arg-type]  # fmt: skip


def measure(
    options: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], Callable[[], None]]:
    """One case: time, memory, FLOPs; and a step to profile."""
    rates = [gpu.matrix_rate(device)]
    mtp.losses.fused.USE_KERNELS = not options.plain_loss
    if options.chunk_floats:
        mtp.losses.fused.CHUNK_FLOATS[device.type] = options.chunk_floats
    setup, state, losses = build(options, device), TrainState(), []
    watch = gpu.Stopwatch(device)
    watch.wrap(setup.draft.head, "chains", "head forward")
    watch.wrap(mtp.draft, "chunked_loss", "loss, forward and backward")
    watch.wrap(torch.nn.utils, "clip_grad_norm_", "clipping")
    for optimizer in setup.optimizers:
        watch.wrap(optimizer, "step", "optimizer")

    def step() -> None:
        record, _ = optimizer_step(setup, state, losses, [])
        losses.append(record["loss"])
        loads.append(record["expert_load_variation"])

    loads: list[list[float]] = []
    gpu.timed_steps(step, device, options.warm_up)
    watch.read()
    with gpu.quiet(options.quiet_by):
        seconds = gpu.timed_steps(step, device, options.steps)
        rates.append(gpu.matrix_rate(device))
    parts = {name: spent / options.steps for name, spent in watch.read().items()}
    median = statistics.median(seconds)
    parts["backward of the head, and the rest"] = sum(seconds) / len(seconds) - sum(parts.values())
    trained = [p for p in setup.draft.parameters() if p.requires_grad]
    source = setup.draft._teacher
    usage = gpu.memory(trained, [source.lm_head, source.embedding], setup.optimizers)

    batches = setup.batches
    flops = step_flops(
        TINY if options.tiny else REAL,
        rows=batches.rows_per_micro_batch * options.accumulation,
        length=options.length,
        num_steps=NUM_LAYERS,
        with_teacher=options.loss != "ce",
    )
    tokens = batches.num_tokens(0)
    found = {
        "step_seconds": seconds,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / median,
        "trained_positions_per_second": tokens * NUM_LAYERS / median,
        "model_flops": asdict(flops) | {"total": flops.total},
        "matrix_rate": rates,
        "mfu": flops.total / median / max(rates),
        "mfu_if_lm_head_were_trained": flops.total_if_lm_head_were_trained / median / max(rates),
        "memory_gib": usage,
        "part_seconds": parts,
        "losses": losses,
        "expert_load_variation": loads[-1],
        "num_trained_parameters": sum(p.numel() for p in trained),
    }
    return found, step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--loss", choices=LOSSES, default="recipe")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--experts", default=EXPERTS)
    parser.add_argument("--plain-loss", action="store_true", help="without the loss's kernels")
    parser.add_argument("--chunk-floats", type=int, default=0)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--profile", type=Path, help="text file for the longest kernels")
    parser.add_argument("--quiet-by", default="", help="see gpu.quiet")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turn", type=Path, help="wait for this file before using the GPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpu.wait_for_turn(options.turn)
    device = torch.device("cpu" if options.tiny else "cuda")
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "turn", "profile")}
    about = {"case": options.name, "trainer": "mtp-graft", "settings": settings}
    try:
        found, step = measure(options, device)
    except torch.OutOfMemoryError as error:
        gpu.emit(about | {"error": f"out of memory: {error}"[:300]}, options.out)
        return
    gpu.emit(about | found, options.out)
    gpu.profile(step, options.profile)


if __name__ == "__main__":
    main()
