"""`mtp train`: distil a draft head from the base that will be served.

`train` sets up, `optimize` is the loop, `finish` writes the head. One optimizer step: take its
batch of whole rows, in micro-batches that fit; for each let the frozen base produce its hidden
states, let the draft compare what it predicts with what the base does, and collect the gradient;
then update the draft's weights. From time to time measure acceptance on held-out prompts, keep the
best head, and write a checkpoint.

A run is a function of recipe, base and data: batches, learning rate and random numbers follow from
the step's number. So a run that was killed and resumed ends in the same weights
(docs/determinism.md), and one process that accumulates takes the same steps as eight.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graft.errors import UserError
from graft.reader import Checkpoint
from graft.staging import check_output, staged_folder
from mtp import __version__
from mtp.checkpoint import disk_bytes, load_checkpoint, require_disk, save_checkpoint
from mtp.data.batches import Batch
from mtp.data.prompts import evaluation_prompts
from mtp.data.store import (
    licences_by_source,
    load_prepared,
    read_manifest,
    require_tokenizer_of,
    rows_digest,
)
from mtp.divergence import divergence_error, what_diverged
from mtp.draft import Draft
from mtp.drafts import DRAFTS
from mtp.held_out import held_out_text
from mtp.history import HISTORY, flat_numbers, read_history
from mtp.losses import require_categories, stage_begin
from mtp.optimizer import build_optimizers, set_learning_rate
from mtp.parallel import (
    agreed,
    gather_weights,
    gathered,
    gradient_exchange,
    local_device,
    rounded_to_bfloat16,
    start_processes,
    summed,
    tracking,
    unsharded,
    whole,
    wrap,
)
from mtp.progress import TrainingBar, interrupted, stop_requests
from mtp.recipe import Recipe
from mtp.recipe_text import dump_recipe
from mtp.run_folder import check_run, open_run, run_path
from mtp.schedule import StepBatches, learning_rate_factor
from mtp.teacher import open_source, pick_device
from mtp.teacher.identity import base_identity
from mtp.train_state import Setup, TrainState
from mtp.warm_start import require_warm_start


def train(
    base: Path,
    data: Path,
    out: Path,
    recipe: Recipe,
    *,
    device: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    max_steps: int | None = None,
    shard: bool = False,
    tracker: str | None = None,
) -> dict[str, Any] | None:
    """Train a draft and write it to `out`; state and log of the run go to `out`.run beside it.

    Args:
        base: the base checkpoint that will be served.
        data: folder of `mtp data prepare`.
        out: the head folder to write.
        recipe: what to train, and how.
        device: "auto", "cpu", "cuda", ...
        overwrite: replace an existing `out`, and an earlier run unless `resume`.
        resume: go on from the newest checkpoint of the run, if there is one.
        max_steps: stop after so many optimizer steps, on the schedule of the recipe.
        shard: with several processes, split weights and optimizer state among them (FSDP2).
        tracker: "tensorboard" or "wandb", beside history.jsonl.

    Returns:
        A summary: losses, tokens, seconds, held-out acceptance before and after; None in all
        processes but the main one.

    Raises:
        UserError: a broken base or data folder, an `out` that must not be written, a run that
            cannot be resumed, a loss that diverged, or a signal that ended the run.
    """
    cache = recipe.teacher.cache_folder
    sources, kind = [base, data, *([cache] if cache else [])], DRAFTS[recipe.train.draft]
    check_output(out, overwrite=overwrite, sources=sources, mark=kind.mark)
    check_run(run_path(out), resume=resume, overwrite=overwrite)
    checkpoint, rows = open_inputs(base, data, recipe)
    place = pick_device(local_device(device))
    accelerator = start_processes(place, tracker, run_path(out))
    batches = StepBatches(
        rows, recipe.train,
        num_processes=accelerator.num_processes, process=accelerator.process_index,
        min_length=kind.min_length(recipe),
    )  # fmt: skip
    write = accelerator.is_main_process
    draft = start(checkpoint, data, recipe, rows, place, write=write)
    identity = run_identity(checkpoint, data, recipe)
    with open_run(run_path(out), identity, dump_recipe(recipe), resume=resume, write=write) as run:
        accelerator.wait_for_everyone()
        state = TrainState(**run.newest_state())
        if state.before is None:
            state.before = draft.evaluate()
        model = wrap(accelerator, draft, shard=shard)
        setup = Setup(
            recipe=recipe, draft=draft, model=model, rows=rows, batches=batches, run=run,
            optimizers=build_optimizers(model, recipe.train), accelerator=accelerator,
            provenance=provenance(recipe, data),
        )  # fmt: skip
        with tracking(accelerator, run.path, state.step, recipe.as_record()):
            optimize(setup, state, max_steps)
        return finish(setup, state, out, overwrite=overwrite, sources=sources)


def open_inputs(base: Path, data: Path, recipe: Recipe) -> tuple[Checkpoint, Any]:
    """The base's shards and the training rows, checked against each other and the recipe: before
    a base is loaded, which takes minutes."""
    checkpoint = Checkpoint(base)
    checkpoint.require_supported()
    if recipe.train.draft == "mtp":
        require_warm_start(recipe.head.warm_start)
    require_tokenizer_of(data, base)
    rows = load_prepared(data)["train"]
    require_categories(recipe.loss.category_weights, rows.unique("category"))
    evaluation_prompts(
        data,
        num_prompts=recipe.eval.num_prompts,
        max_prompt_tokens=recipe.eval.max_prompt_tokens,
    )
    return checkpoint, rows


def run_identity(checkpoint: Checkpoint, data: Path, recipe: Recipe) -> dict[str, Any]:
    """What a resumed run must have in common with the one that it goes on with."""
    return {
        "draft": recipe.train.draft,
        "recipe": recipe.as_record(),
        "base": base_identity(checkpoint),
        "data": rows_digest(data),
    }


def start(
    checkpoint: Checkpoint,
    data: Path,
    recipe: Recipe,
    rows: Any,
    place: torch.device,
    *,
    write: bool,
) -> Draft:
    """The draft at its warm start, with its teacher; the process that may `write` fills a cache."""
    torch.manual_seed(recipe.train.seed)
    base = checkpoint.folder
    teacher = open_source(recipe.teacher, base, data, device=str(place))
    text = held_out_text(teacher, base, data, recipe, write=write)
    return DRAFTS[recipe.train.draft].from_base(checkpoint, teacher, recipe, text, rows)


def provenance(recipe: Recipe, data: Path) -> dict[str, Any]:
    """What a head says of how it was made."""
    manifest = read_manifest(data)
    return {
        "tool": f"mtp-graft {__version__}",
        "recipe": recipe.as_record(),
        "licences": sorted(manifest.get("licences", [])),
        "licences_by_source": licences_by_source(manifest),
    }


def optimize(setup: Setup, state: TrainState, max_steps: int | None = None) -> None:
    """The loop. Updates the draft and `state` in place.

    Raises:
        UserError: the loss diverged, or a signal ended the run; a checkpoint is then written.
    """
    settings, run, accelerator = setup.recipe.train, setup.run, setup.accelerator
    if state.step:
        load_checkpoint(run.checkpoint(state.step), setup.draft, setup.optimizers)
    elif settings.checkpoint_every and accelerator.is_main_process:
        require_disk(run.path, disk_bytes(setup.draft, settings.keep_checkpoints))
    earlier = run.restart_history(state.step) if accelerator.is_main_process else []
    losses = agreed(accelerator, [record["loss"] for record in earlier])
    last = settings.steps if max_steps is None else min(max_steps, settings.steps)
    setup.model.train()
    bar = TrainingBar(last, state.step, enabled=accelerator.is_main_process)
    with stop_requests() as requests, bar:
        while state.step < last and not setup.stalled(state):
            record, stopping = optimizer_step(setup, state, losses, requests)
            losses.append(record["loss"])
            if due(settings.eval_every, state.step) or state.step == settings.steps:
                record |= evaluate(setup, state)
            if accelerator.is_main_process:
                run.append(record)
            accelerator.log(flat_numbers(record), step=state.step)
            bar.show(record)
            paused = state.step < settings.steps and (stopping or state.step == last)
            if paused or due(settings.checkpoint_every, state.step):
                write_checkpoint(setup, state)
            if stopping and state.step < last:
                raise interrupted(requests, state.step, last, run.path)


def optimizer_step(
    setup: Setup, state: TrainState, losses: list[float], requests: list[str]
) -> tuple[dict[str, Any], bool]:
    """One optimizer step.

    Args:
        setup, state: the run; `state` moves on by a step.
        losses: of all steps before.
        requests: filled when this process is asked to stop.

    Returns:
        The step's record for the history, and whether any process was asked to stop.

    Raises:
        UserError: the loss or the gradient is no number, or explodes; nothing was updated.
    """
    settings, accelerator = setup.recipe.train, setup.accelerator
    started = time.monotonic()
    rate = settings.learning_rate * learning_rate_factor(settings, state.step)
    set_learning_rate(setup.optimizers, rate)
    torch.manual_seed(settings.seed + state.step)  # resumed runs draw the same numbers
    batches = list(setup.batches.micro_batches(state.step))

    weights = torch.stack([setup.draft.target_weights(batch).double() for batch in batches])
    totals = summed(accelerator, weights.sum(0)).float()

    parts = []
    for number, batch in enumerate(batches, 1):
        with gradient_exchange(setup.model, number == len(batches)):
            loss, statistics = setup.model(batch, totals, state.step / settings.steps)
            (loss * accelerator.num_processes).backward()
        parts.append(torch.cat([loss.detach().reshape(1), *statistics.values()]))
    asked = torch.tensor([float(bool(requests))], device=parts[0].device)
    shared = summed(accelerator, torch.cat([torch.stack(parts).sum(0), asked]))
    loss, *values, stopping = shared.tolist()
    parameters = [p for group in setup.optimizers for g in group.param_groups for p in g["params"]]
    norm = float(whole(nn.utils.clip_grad_norm_(parameters, settings.max_gradient_norm)))
    begin = stage_begin(setup.recipe.loss, state.step / settings.steps)
    if wrong := what_diverged(loss, norm, losses[math.ceil(begin * settings.steps) :]):
        raise divergence(setup, state, wrong, batches, parts)
    for optimizer in setup.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    num_tokens, seconds = setup.batches.num_tokens(state.step), time.monotonic() - started
    state.step, state.tokens = state.step + 1, state.tokens + num_tokens
    state.seconds += seconds
    record = {
        "step": state.step,
        "loss": loss,
        **dict(zip(statistics, split(values, len(statistics)), strict=True)),
        **setup.draft.step_statistics(),
        "learning_rate": rate,
        "gradient_norm": norm,
        "tokens": state.tokens,
        "tokens_per_second": num_tokens / seconds,
    }
    return record, bool(stopping)


def evaluate(setup: Setup, state: TrainState) -> dict[str, Any]:
    """Measure the draft as it would be written, in BF16; keep it when it is the best so far.

    The number is held-out acceptance, never the loss: that keeps falling after acceptance has
    peaked. Among equals the later head stays.
    """
    with rounded_to_bfloat16(setup.draft), unsharded(setup.model):
        metrics = agreed(setup.accelerator, setup.draft.evaluate())
        accepted = metrics["mean_accepted"]
        best = state.best["acceptance"]["mean_accepted"] if state.best else -1.0
        state.num_without_best = 0 if accepted > best else state.num_without_best + 1
        if accepted >= best:
            state.best = {"step": state.step, "acceptance": metrics}
            weights = gather_weights(setup.draft, keep=setup.accelerator.is_main_process)
            if setup.accelerator.is_main_process:
                export_best(setup, state, weights)
    state.measured = state.step
    return {"mean_accepted": accepted, "cumulative": metrics["cumulative"]}


def export_best(setup: Setup, state: TrainState, weights: dict[str, torch.Tensor]) -> None:
    """Write the head of this step into the run folder, in place of one that no checkpoint needs."""
    assert state.best and state.before
    made = setup.provenance | {
        "step": state.step,
        "tokens": state.tokens,
        "warm_start_mean_accepted": state.before["mean_accepted"],
    }
    with staged_folder(setup.run.best(state.step), overwrite=True) as staging:
        setup.draft.export(staging, weights, provenance=made, acceptance=state.best["acceptance"])
    setup.run.prune(setup.recipe.train.keep_checkpoints, state.step)


def write_checkpoint(setup: Setup, state: TrainState) -> None:
    """Write the resume state of this step, then remove what it replaces."""
    write = setup.accelerator.is_main_process
    if write:
        setup.run.sync_history()
    folder = setup.run.checkpoint(state.step)
    save_checkpoint(folder, setup.draft, setup.optimizers, asdict(state), write=write)
    if write:
        setup.run.prune(setup.recipe.train.keep_checkpoints)
    setup.accelerator.wait_for_everyone()


def finish(
    setup: Setup, state: TrainState, out: Path, *, overwrite: bool, sources: list[Path]
) -> dict[str, Any] | None:
    """Write the best head to `out`, with the history and the recipe; return the summary."""
    # Known before the head of a stop is measured: that is no measurement of the recipe's.
    complete = state.step == setup.recipe.train.steps or setup.stalled(state)
    if state.measured != state.step or state.best is None:
        evaluate(setup, state)
    run, best = setup.run, state.best
    assert best is not None
    if setup.accelerator.is_main_process:
        with staged_folder(
            out, overwrite=overwrite, sources=sources, mark=setup.draft.mark
        ) as staging:
            run.deliver(run.best(best["step"]), staging)
        if complete:
            run.close()
    setup.accelerator.wait_for_everyone()
    setup.accelerator.end_training()
    if not setup.accelerator.is_main_process:
        return None
    history = read_history(run.path / HISTORY)
    return {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "final_loss_per_position": history[-1]["loss_per_position"] if history else None,
        "before": state.before,
        "after": best["acceptance"],
        "best_step": best["step"],
        "complete": complete,
        "run": str(run.path),
    }


def divergence(
    setup: Setup, state: TrainState, what: str, batches: list[Batch], parts: list[torch.Tensor]
) -> UserError:
    """The error that names the rows: those of micro-batches without a finite loss, else all."""
    broken = [b for b, part in zip(batches, parts, strict=True) if not part.isfinite().all()]
    named = gathered(setup.accelerator, [index for batch in broken for index in batch.rows])
    indices = named or [i for part in setup.batches.row_indices(state.step) for i in part]
    checkpoints = setup.run.checkpoints()
    last = str(checkpoints[-1]) if checkpoints else "none yet"
    return divergence_error(state.step + 1, what, setup.rows, indices, last)


def due(every: int, step: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one."""
    return bool(every) and step % every == 0


def split(values: list[float], num_parts: int) -> list[list[float]]:
    """A list in equal parts."""
    size = len(values) // num_parts
    return [values[start : start + size] for start in range(0, len(values), size)]
