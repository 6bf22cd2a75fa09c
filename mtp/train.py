"""`mtp train`: distil a head from the base that will be served.

`train` sets up, measures before and after, and writes; `optimize` is the loop. One step: take a
batch of whole rows, let the frozen base produce its hidden states, run the chain over them, compare
each step's prediction with the base's own distribution at the matching position, and update the
head's weights only.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graft.manifest import base_fingerprint
from graft.reader import Checkpoint
from graft.staging import staged_folder
from mtp import __version__
from mtp.acceptance import Runtime, continue_prompts, measure
from mtp.data.batches import token_budget_batches
from mtp.data.prompts import evaluation_prompts
from mtp.data.store import load_prepared, read_manifest, require_tokenizer_of
from mtp.head import MTPHead, head_from_base, save_head
from mtp.losses import align, category_weights, chunked_loss, objective_at, position_weights
from mtp.progress import track
from mtp.recipe import Recipe, TrainRecipe
from mtp.router_load import RouterLoad, freeze_routers
from mtp.teacher import Teacher


def train(
    base: Path,
    data: Path,
    out: Path,
    recipe: Recipe,
    *,
    device: str = "auto",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Train a head and write it to `out`.

    Args:
        base: the base checkpoint that will be served.
        data: folder of `mtp data prepare`.
        out: the head folder to write.
        recipe: what to train, and how.
        device: "auto", "cpu", "cuda", ...
        overwrite: replace an existing `out`.

    Returns:
        A summary: losses, tokens, seconds, and acceptance before and after on held-out prompts.

    Raises:
        UserError: a broken base or data folder, or an `out` that must not be written.
    """
    torch.manual_seed(recipe.train.seed)
    with staged_folder(out, overwrite=overwrite, sources=[base, data]) as staging:
        checkpoint = Checkpoint(base)
        checkpoint.require_supported()
        require_tokenizer_of(data, base)
        rows = load_prepared(data)["train"]
        prompts = evaluation_prompts(
            data,
            num_prompts=recipe.eval.num_prompts,
            max_prompt_tokens=recipe.eval.max_prompt_tokens,
        )
        teacher = Teacher.load(base, device=device)
        head = head_from_base(checkpoint, recipe.head.num_layers, recipe.head.warm_start)
        head.to(teacher.device)
        if not recipe.head.train_router:
            freeze_routers(head)

        num_steps = recipe.train.num_speculative_tokens or head.num_layers
        runtime: Runtime = "stock" if recipe.train.runtime == "stock" else "routed"
        text = continue_prompts(teacher, prompts, recipe.eval.num_tokens, num_steps)
        before = measure(teacher, head, text, num_steps=num_steps, runtime=runtime)

        started = time.monotonic()
        history = optimize(head, teacher, rows, recipe)
        seconds = time.monotonic() - started

        round_to_bfloat16(head)  # what is measured is what is saved
        after = measure(teacher, head, text, num_steps=num_steps, runtime=runtime)
        summary = {
            "steps": recipe.train.steps,
            "tokens": history[-1]["tokens"] if history else 0,
            "seconds": seconds,
            "final_loss_per_position": history[-1]["loss_per_position"] if history else None,
            "before": before,
            "after": after,
        }
        save_head(
            head,
            staging,
            base_fingerprint=base_fingerprint(checkpoint),
            provenance={
                "tool": f"mtp-graft {__version__}",
                "recipe": asdict(recipe),
                "tokens": summary["tokens"],
                "warm_start_mean_accepted": before["mean_accepted"],
                "licences": sorted(read_manifest(data).get("licences", [])),
            },
            acceptance=after,
        )
        write_history(staging / "history.jsonl", history)
    return summary


def optimize(head: MTPHead, teacher: Teacher, rows: Any, recipe: Recipe) -> list[dict[str, Any]]:
    """The loop. Updates `head` in place; returns one record an optimizer step."""
    settings = recipe.train
    num_steps = settings.num_speculative_tokens or head.num_layers
    weights = position_weights(recipe.loss, num_steps).to(teacher.device)
    optimizer = torch.optim.AdamW(
        head.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(settings, step)
    )
    head.train()
    load = RouterLoad(head)
    num_tokens, history = 0, []
    batches = endless_batches(rows, settings)
    for step in track(range(settings.steps), "training the head", unit="step"):
        batch = next(batches)
        input_ids = batch.input_ids.to(teacher.device)
        hidden, embeddings = teacher.hidden(input_ids), teacher.embed(input_ids)
        with teacher.autocast():  # float32 weights; bfloat16 arithmetic on a GPU
            chains = head.chains(settings.runtime, hidden.float(), embeddings.float(), num_steps)
        mask = batch.loss_mask.to(teacher.device)
        row_weights = category_weights(recipe.loss.category_weights, batch.categories)
        objective = objective_at(recipe.loss, step / settings.steps)
        results = []
        for outputs in chains.values():
            aligned = align(
                [output.to(hidden.dtype) for output in outputs],
                hidden, input_ids, mask, num_steps, row_weights.to(teacher.device),
            )  # fmt: skip
            results.append(
                chunked_loss(
                    aligned, teacher.lm_head, objective, weights, restricted=recipe.loss.restricted
                )
            )
        sum(result.loss for result in results).backward()
        norm = torch.nn.utils.clip_grad_norm_(head.parameters(), settings.max_gradient_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)

        num_tokens += int(batch.lengths.sum())
        history.append(
            {
                "step": step,
                "loss_per_position": results[0].per_position.tolist(),
                "agreement_per_position": results[0].agreement.tolist(),
                "gradient_norm": float(norm),
                "expert_load_variation": [layer.variation for layer in load.read()],
                "tokens": num_tokens,
            }
        )
        if len(results) > 1:
            history[-1]["stock_loss_per_position"] = results[1].per_position.tolist()
    load.remove()
    return history


def learning_rate_factor(settings: TrainRecipe, step: int) -> float:
    """Factor of the learning rate at an optimizer step: linear warm-up, then cosine."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    remaining = max(settings.steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / remaining, 1.0)
    floor = settings.min_learning_rate / settings.learning_rate
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def endless_batches(rows: Any, settings: TrainRecipe) -> Any:
    """Batches of epoch after epoch, each epoch in its own order."""
    epoch = 0
    while True:
        yield from token_budget_batches(
            rows, max_tokens=settings.tokens_per_batch, seed=settings.seed, epoch=epoch, pad_id=0
        )
        epoch += 1


@torch.no_grad()
def round_to_bfloat16(head: MTPHead) -> None:
    """Round every weight to what BF16 holds, in place."""
    for parameter in head.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def write_history(path: Path, history: list[dict[str, Any]]) -> None:
    """One JSON object a step; the first line carries the schema version."""
    import json

    with path.open("w") as file:
        file.write(json.dumps({"schema_version": 1}) + "\n")
        for record in history:
            file.write(json.dumps(record) + "\n")
