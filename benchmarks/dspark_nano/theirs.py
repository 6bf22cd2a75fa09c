"""The same base, rows, steps and shape through speculators' own class, loss and anchors.

    PYTHONPATH=.:PKGS python benchmarks/dspark_nano/theirs.py RECIPE BASE DATA OUT SEED [fixed-norm]

PKGS as for through_speculators.py. Each step packs the rows of ours into one sequence, as its
trainer does, and calls `DSparkDraftModel.forward` with {ce 0.1, tv 0.9}; optimizer, schedule, clip
and the number of anchors are ours. It is not its command line: that wants a vLLM server for the
states. What comes out is saved by `save_pretrained` and measured as ours is.

`fixed-norm` gives it the base's states after the final norm: speculators 0.9.0 does not list
qwen3_5_moe among the models whose norm counts from 1 (`models/utils.py`), so its targets for such a
base are of another model.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dspark import DSparkDraftModel
from speculators.train.cli import create_transformer_layer_config

from graft.reader import Checkpoint
from mtp.data.batches import Batch
from mtp.data.store import load_prepared
from mtp.dspark.config import choose_mask_token
from mtp.dspark.evaluate import Measured, measure
from mtp.dspark.export import load_draft
from mtp.dspark.vocabulary import choose_vocabulary, supervised_counts
from mtp.held_out import held_out_text
from mtp.optimizer import build_optimizers, set_learning_rate
from mtp.recipe import Recipe, load_recipe
from mtp.schedule import StepBatches, learning_rate_factor
from mtp.teacher import Teacher


def start(recipe: Recipe, base: Path, rows) -> DSparkDraftModel:
    """Their model at its own start, with our draft vocabulary."""
    settings, checkpoint = recipe.dspark, Checkpoint(base)
    counts = supervised_counts(rows, checkpoint.text_config["vocab_size"])
    vocabulary = choose_vocabulary(counts, settings.draft_vocab_size)
    layers = create_transformer_layer_config(
        str(base), settings.num_layers, "qwen3", None, settings.sliding_window, []
    )
    return DSparkDraftModel.from_training_args(
        layers, vocabulary.t2d, vocabulary.d2t, draft_vocab_size=settings.draft_vocab_size,
        block_size=settings.block_size, verifier_name_or_path=str(base),
        target_layer_ids=list(settings.aux_layers), markov_rank=settings.markov_rank,
        mask_token_id=choose_mask_token(base, checkpoint.text_config, settings.mask_token_id),
        draft_attn_impl="sdpa",
    ).float()  # fmt: skip


def packed(teacher: Teacher, batch: Batch, layers: tuple[int, ...], fixed: bool) -> dict:
    """The rows of a batch one after the other, as their forward takes them."""
    size = teacher.lm_head.shape[1]
    depth = len(teacher.model.get_decoder().layers)
    states = teacher.batch_hidden(batch, (*layers, depth))
    real = torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]
    number = torch.arange(len(batch.rows))[:, None].expand_as(real)
    position = torch.arange(batch.input_ids.shape[1]).expand_as(real)
    final = states[..., -size:] if fixed else states[..., -2 * size : -size]
    return {
        "hidden_states": states[real][None, :, : -2 * size],
        "verifier_last_hidden_states": final[real][None], "input_ids": batch.input_ids[real][None],
        "loss_mask": batch.loss_mask[real][None].float(), "document_ids": number[real][None],
        "position_ids": position[real][None],
    }  # fmt: skip


def main(recipe_file: Path, base: Path, data: Path, out: Path, seed: int, fixed: bool) -> None:
    recipe = load_recipe(recipe_file)
    recipe = replace(recipe, train=replace(recipe.train, seed=seed))
    settings, rows = recipe.train, load_prepared(data)["train"]
    torch.manual_seed(seed)
    teacher = Teacher.load(base, device="cpu")
    model = start(recipe, base, rows).train()
    if fixed:
        model.verifier_norm = torch.nn.Identity()
    optimizers = build_optimizers(model, settings)
    batches, losses = StepBatches(rows, settings), resolve_loss_config(
        json.dumps({"ce": recipe.dspark.ce, "tv": recipe.dspark.tv}), "eager"
    )  # fmt: skip
    started = time.monotonic()
    for step in range(settings.steps):
        torch.manual_seed(settings.seed + step)
        set_learning_rate(optimizers, settings.learning_rate * learning_rate_factor(settings, step))
        for batch in batches.micro_batches(step):
            inputs = packed(teacher, batch, recipe.dspark.aux_layers, fixed)
            anchors = recipe.dspark.max_anchors * len(batch.rows)
            _, loss, metrics = model(
                **inputs, max_anchors=anchors, loss_config=losses, gamma=recipe.dspark.decay,
                tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0],
            )  # fmt: skip
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            said = float(metrics["accept_len_sum"] / metrics["accept_len_total"])
            print(step, f"loss {float(loss):.4f}, its accept_len {said:.3f}", flush=True)
    seconds = time.monotonic() - started
    model.to(torch.bfloat16).save_pretrained(out)
    ours, vocabulary = load_draft(out)
    text = held_out_text(teacher, base, data, recipe)
    measured = Measured(
        source=teacher, model=ours, vocabulary=vocabulary,
        num_slots=recipe.dspark.num_speculative_tokens,
    )  # fmt: skip
    result = {"seconds": seconds, "seed": seed, "fixed_norm": fixed, **measure(measured, text)}
    (out / "eval.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"acc-len {result['acc_len']:.3f}", [f"{share:.3f}" for share in result["cumulative"]])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]), int(sys.argv[5]), "fixed-norm" in sys.argv)
