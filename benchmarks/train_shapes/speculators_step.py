"""Training steps of `speculators` 0.9.0's MTP draft at the 35B's shapes, on the same kind of input.

    python benchmarks/train_shapes/speculators_step.py --name NAME --tokens 4096 --out OUT.jsonl

Its own model class (one layer, run four times), its own loss, and the lines of its trainer's step:
autocast to BF16 over float32 weights, `zero_grad`, backward, clipping, its AdamW. As in its
trainer a batch is one sequence of `--tokens` tokens with rows packed behind one another, and the
model's `forward` is under `torch.compile` (README.md here says why `--eager` exists). Needs
speculators and what it imports; `--tiny` rehearses on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo

sys.path.insert(0, str(Path(__file__).parent))
import gpu
from shapes import NUM_LAYERS, REAL, TINY, step_flops

# Its first step may compile for minutes; a case that has not begun to step by then is reported so.
COMPILE_SECONDS = 120


def build(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """`MTPDraftModel` as `from_training_args` makes it, of random weights."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    shapes = TINY if options.tiny else REAL
    layer = Qwen3_5MoeTextConfig(**{k: v for k, v in shapes.items() if k != "model_type"})
    if options.experts:
        layer._experts_implementation = options.experts
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_LAYERS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=None, architectures=["Qwen3_5MoeForConditionalGeneration"]
            ),
        ),
    )
    with device:
        model = MTPDraftModel(config=config)
        del model.verifier_lm_head  # as its load_verifier_weights does for MTP
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        torch.nn.init.normal_(model.lm_head.weight, std=4 / shapes["hidden_size"] ** 0.5)
    return model.to(getattr(torch, options.weights)).train()


def batch(options: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """What its collator and `shift_batch_mtp` give: rows packed into one sequence."""
    shapes = TINY if options.tiny else REAL
    hidden = torch.randn(1, options.tokens, shapes["hidden_size"]).bfloat16()
    length = min(options.length, options.tokens)
    return {
        "input_ids": torch.randint(0, shapes["vocab_size"], (1, options.tokens)),
        "hidden_states": hidden,
        "loss_mask": torch.ones(1, options.tokens, dtype=torch.long),
        "lengths": torch.full((options.tokens // length,), length),
        "position_ids": torch.arange(options.tokens).remainder(length).unsqueeze(0),
    }


def measure(
    options: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], Callable[[], None]]:
    """One case: time, memory, FLOPs; and a step to profile."""
    from speculators.train.optimizers import build_optimizers

    rates = [gpu.matrix_rate(device)]
    torch.manual_seed(0)
    model = build(options, device)
    settings = SimpleNamespace(optimizer="adamw", lr=5e-5, weight_decay=0.01)
    optimizers = build_optimizers(model, settings)
    given = model.get_trainer_kwargs(num_speculative_steps=NUM_LAYERS)[0]
    inputs, losses = batch(options, device), []

    def step() -> None:
        on_device = {k: v.to(device, non_blocking=True) for k, v in inputs.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16):
            _, loss, _ = model(**on_device, **given)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())  # its default logs every step

    started = time.perf_counter()
    gpu.timed_steps(step, device, options.warm_up)
    first = time.perf_counter() - started
    repeats = options.steps if first < COMPILE_SECONDS else 1
    with gpu.quiet(options.quiet_by):
        seconds = gpu.timed_steps(step, device, repeats)
        rates.append(gpu.matrix_rate(device))
    median = statistics.median(seconds)
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    usage = gpu.memory(trained, frozen, optimizers)
    flops = step_flops(
        TINY if options.tiny else REAL, rows=1, length=options.tokens, num_steps=NUM_LAYERS,
        with_teacher=False,
    )  # fmt: skip
    layer_config = model.config.transformer_layer_config
    found = {
        "step_seconds": seconds,
        "warm_up_seconds": first,
        "tokens_per_step": options.tokens,
        "tokens_per_second": options.tokens / median,
        "trained_positions_per_second": options.tokens * NUM_LAYERS / median,
        "matrix_rate": rates,
        "mfu": flops.total / median / max(rates),
        "memory_gib": usage,
        "losses": losses,
        "experts_implementation": str(layer_config._experts_implementation),
        "attention_implementation": str(layer_config._attn_implementation),
        "num_trained_parameters": sum(p.numel() for p in trained),
    }
    return found, step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step: one packed sequence")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--experts", help="transformers' name; by default what speculators leaves")
    parser.add_argument("--weights", default="float32", help="its trainer's own on one GPU")
    parser.add_argument("--eager", action="store_true", help="without its torch.compile")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--quiet-by", default="", help="see gpu.quiet")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turn", type=Path, help="wait for this file before using the GPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.eager:
        torch._dynamo.config.disable = True
    import speculators.models.mtp  # noqa: F401  imported before the turn

    gpu.wait_for_turn(options.turn)
    device = torch.device("cpu" if options.tiny else "cuda")
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "turn", "profile")}
    about = {"case": options.name, "trainer": "speculators 0.9.0", "settings": settings}
    try:
        found, step = measure(options, device)
    except torch.OutOfMemoryError as error:
        gpu.emit(about | {"error": f"out of memory: {error}"[:300]}, options.out)
        return
    gpu.emit(about | found, options.out)
    gpu.profile(step, options.profile)


if __name__ == "__main__":
    main()
