"""Distillation with quantized experts in the loop (QAD), for a head that lost too much.

modelopt's quantizers stay around the experts while the project's own training loop runs, so the
head learns with the weights that will be stored and, for W4A4, the inputs that FP4 kernels see. The
gradient passes a quantizer as if it were not there. Tensor scales stand still meanwhile; the
trained head is then calibrated like any other. On a CPU modelopt has no kernels for the forward
pass, and `quantize.packing` stands in, registered as a backend: the values that packing stores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graft.manifest import HeadFolder, base_fingerprint
from graft.reader import Checkpoint
from mtp import __version__
from mtp.acceptance import Continuations
from mtp.data.store import load_prepared
from mtp.draft import MTPDraft
from mtp.head import MTPHead, load_head
from mtp.optimizer import build_optimizers
from mtp.parallel import start_processes
from mtp.recipe import Recipe
from mtp.recipe_text import dump_recipe
from mtp.router_load import freeze_routers
from mtp.run_folder import RunFolder, open_run
from mtp.schedule import StepBatches
from mtp.teacher import Teacher
from mtp.train import Setup, TrainState, optimize
from quantize.calibration import Scheme, calibrate
from quantize.lazy_modelopt import modelopt_module
from quantize.packing import fake_quantize

BACKEND = "mtp-graft-nvfp4"


def distil(
    source: HeadFolder,
    checkpoint: Checkpoint,
    teacher: Teacher,
    data: Path,
    rows: list[torch.Tensor],
    workspace: Path,
    recipe: Recipe,
    text: Continuations,
    before: dict[str, Any],
    *,
    scheme: Scheme,
    num_steps: int,
) -> HeadFolder:
    """Train a BF16 head for some steps with fake-quantized experts.

    Args:
        source: the head; its recipe says which runtime it is for.
        checkpoint: the base.
        teacher: the same, in process.
        data: prepared folder; its training rows.
        rows: [1, T] token ids each, to calibrate on.
        workspace: an empty folder for the run and the trained head.
        recipe: loss, learning rate and batches.
        text: what the trained head is measured on.
        before: acceptance of `source`.
        scheme: whether inputs are quantized too.
        num_steps: optimizer steps.

    Returns:
        The trained head, BF16, in `workspace`.

    Raises:
        UserError: the loss diverged.
    """
    recipe = _recipe_for(source, recipe, num_steps)
    head = load_head(source.folder, experts_implementation="eager").to(teacher.device)
    with _backend(teacher.device) as backend:
        calibrate(head, lambda model: _run(model, teacher, rows, recipe), scheme, backend=backend)
        if not recipe.head.train_router:
            freeze_routers(head)
        if recipe.train.runtime == "stock":
            head.layers[1:].requires_grad_(False)
        draft = MTPDraft(head, teacher, recipe, text, base_fingerprint(checkpoint))
        identity = {"qad": num_steps}
        with open_run(workspace / "run", identity, dump_recipe(recipe), resume=False) as run:
            provenance = _provenance(source.metadata["provenance"], recipe, num_steps)
            setup = _setup(draft, teacher, recipe, data, run, provenance)
            state = TrainState(before=before)
            optimize(setup, state)
            assert state.best is not None  # the last step is always measured
            return HeadFolder(run.best(state.best["step"]))


def _setup(
    draft: MTPDraft,
    teacher: Teacher,
    recipe: Recipe,
    data: Path,
    run: RunFolder,
    provenance: dict[str, Any],
) -> Setup:
    """What the training loop works with: one process, all training rows."""
    accelerator = start_processes(teacher.device, None, run.path)
    rows = load_prepared(data)["train"]
    return Setup(
        recipe=recipe,
        draft=draft,
        model=draft,
        optimizers=build_optimizers(draft, recipe.train),
        batches=StepBatches(
            rows, recipe.train, num_processes=1, process=0, min_length=draft.min_length(recipe)
        ),
        rows=rows,
        run=run,
        accelerator=accelerator,
        provenance=provenance,
    )


def _recipe_for(source: HeadFolder, recipe: Recipe, num_steps: int) -> Recipe:
    """The recipe with this many steps, for the runtime and steps of the head's own training."""
    trained = source.metadata["provenance"].get("recipe", {}).get("train", {})
    settings = replace(
        recipe.train,
        runtime=trained.get("runtime", "routed"),
        num_speculative_tokens=trained.get("num_speculative_tokens", 0),
        steps=num_steps,
        warmup_steps=min(recipe.train.warmup_steps, num_steps // 10),
        eval_every=0,
        checkpoint_every=0,
    )
    return replace(recipe, train=settings, head=replace(recipe.head, num_layers=source.num_layers))


def _provenance(trained: dict[str, Any], recipe: Recipe, num_steps: int) -> dict[str, Any]:
    """How the head was trained, and then distilled; the loop notes its own step and tokens."""
    qad = {
        "steps": num_steps,
        "learning_rate": recipe.train.learning_rate,
        "tool": f"mtp-graft {__version__}",
        "trained_before": {key: trained[key] for key in ("step", "tokens") if key in trained},
    }
    return trained | {"qad": qad}


@torch.no_grad()
def _run(head: MTPHead, teacher: Teacher, rows: list[torch.Tensor], recipe: Recipe) -> None:
    """Calibration: every chain that the runtime executes; the quantizers only watch."""
    for row in rows:
        hidden, embeddings = teacher.hidden(row).float(), teacher.embed(row).float()
        steps = recipe.train.num_speculative_tokens or head.num_layers
        # A routed chain as well, so that layers that a stock runtime never runs have scales too.
        head.chains("both", hidden, embeddings, max(steps, head.num_layers))


@contextlib.contextmanager
def _backend(device: torch.device) -> Iterator[str | None]:
    """The name of a registered backend where modelopt has no kernels of its own."""
    if device.type == "cuda":
        yield None
        return
    quantizers = modelopt_module("quantization.nn")
    quantizers.register_quant_backend(BACKEND, _straight_through)
    try:
        yield BACKEND
    finally:
        quantizers.unregister_quant_backend(BACKEND)


def _straight_through(inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Quantized values, with the gradient of the identity."""
    values = fake_quantize(inputs.detach(), quantizer.amax)
    return inputs + (values - inputs.detach())
