"""What a head is measured on: held-out prompts, the base's continuations, its states of both.

They depend on the base, the prompts and two numbers, and on nothing that is trained. So where
training has no base in process, one is loaded to make them and freed again, before there is an
optimizer that needs the memory; and beside cached states they are kept, so that every later run
finds them. Price: the bytes of as many cached tokens, 0.3 GB at hidden size 2048 with 64 prompts of
1024 tokens.

File: continuations [P, N]; states [sum of lengths, H] of prompts and continuations, one after the
other, in the dtype that the base computes in.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from graft.errors import UserError
from graft.reader import Checkpoint
from mtp.acceptance import Continuations, continue_prompts, num_checked
from mtp.data.prompts import Prompt, evaluation_prompts
from mtp.recipe import Recipe
from mtp.teacher import Teacher
from mtp.teacher.cache_layout import save_aside
from mtp.teacher.identity import base_identity
from mtp.teacher.source import HiddenSource

FOLDER = "continuations"


def held_out_text(
    source: HiddenSource,
    base: Path,
    data: Path,
    recipe: Recipe,
    *,
    cache: Path | None = None,
    write: bool = True,
) -> Continuations:
    """The held-out prompts of a recipe, continued by the base.

    Args:
        source: what training reads states from. Only a `Teacher` can continue a text; for any
            other the base is loaded.
        base: the base.
        data: folder of `mtp data prepare`.
        recipe: the prompts, and how far they are continued.
        cache: a cache of hidden states, to find the continuations in and to keep them in; the
            recipe's when not given.
        write: False in all processes but one, which keep nothing.

    Raises:
        UserError: no prompts, or a file in the cache that is broken or not of this base.
    """
    prompts = evaluation_prompts(
        data,
        num_prompts=recipe.eval.num_prompts,
        max_prompt_tokens=recipe.eval.max_prompt_tokens,
    )
    num_steps = recipe.num_steps
    layers = recipe.layers_read(int(Checkpoint(base).text_config["num_hidden_layers"]))
    path = None
    cache = cache or recipe.teacher.cache_folder
    if cache is not None:
        name = _name(base, prompts, num_checked(recipe.eval.num_tokens, num_steps), layers)
        path = cache / FOLDER / name
        if path.is_file():
            return _read(path, prompts, recipe.eval.num_tokens)
    teacher = (
        source if isinstance(source, Teacher) else Teacher.load(base, device=str(source.device))
    )
    text = continue_prompts(teacher, prompts, recipe.eval.num_tokens, num_steps, layers)
    if teacher is not source:
        del teacher
        gc.collect()  # a model is full of cycles
        if source.device.type == "cuda":
            torch.cuda.empty_cache()
    if path is not None and write:
        _write(path, text)
    return text


def _name(base: Path, prompts: list[Prompt], num_tokens: int, layers: tuple[int, ...]) -> str:
    """A file name that only the same base, prompts, length and layers have."""
    identity: dict[str, Any] = {
        "base": base_identity(Checkpoint(base)),
        "prompts": [prompt.token_ids for prompt in prompts],
        "num_tokens": num_tokens,
    }
    if layers:
        identity["layers"] = layers
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{digest[:32]}.safetensors"


def _write(path: Path, text: Continuations) -> None:
    tensors = {"continuations": torch.tensor(text.continuations), "states": torch.cat(text.states)}
    metadata = {"end_tokens": json.dumps(sorted(text.end_tokens)), "sha256": _digest(tensors)}
    # Under a name of its own first: heads that train side by side make the same file.
    own = path.with_stem(f"{path.stem}.{os.getpid()}")
    try:
        save_aside(tensors, own, metadata)
        own.rename(path)
    except OSError as error:
        raise UserError(
            f"a cache in {path.parent.parent} that can be written", str(error), "copy it elsewhere"
        ) from error


def _read(path: Path, prompts: list[Prompt], num_tokens: int) -> Continuations:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("continuations", "states")}
            metadata = file.metadata()
        if metadata["sha256"] != _digest(tensors):
            raise ValueError("other bytes than were written")
        continuations, states = tensors.values()
        parts = states.split([len(p.token_ids) + continuations.shape[1] for p in prompts])
        end_tokens = frozenset(json.loads(metadata["end_tokens"]))
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"held-out continuations in {path}",
            str(error),
            "remove that file: the next run makes it again",
        ) from error
    return Continuations(prompts, continuations.tolist(), list(parts), num_tokens, end_tokens)


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
