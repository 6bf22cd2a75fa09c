"""A quantized base as a plain transformers model: built empty, filled from the shards.

transformers cannot load modelopt's NVFP4 and loads compressed-tensors only with another package,
in kernels that not every machine has. A head should still be matched to the quantized model that
it will serve with, so the weights are unpacked while they are read: what the model computes with
are the values that the packed bytes stand for, in the model's dtype. The price is the memory of
the unquantized model (2 bytes a parameter in BF16) plus one tensor at a time, and activations
that are not quantized.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from graft.errors import UserError
from graft.layout import base_tensor_names
from graft.reader import Checkpoint
from mtp.progress import track
from mtp.teacher.packed import StoredWeight, fp8_block, load_weight, stored_weights

_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
Place = tuple[str, int | None, str]  # parameter, expert, projection; (name, None, "") is the whole


def load_dequantized(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Build the base's language model on `device` and fill it with unpacked weights.

    Args:
        checkpoint: any scheme of `mtp.teacher.packed`, or plain weights.
        device: where the model is built; no second copy is made.
        dtype: of the parameters; unpacked values are rounded to it once.

    Returns:
        transformers' causal language model, in evaluation mode.

    Raises:
        UserError: weights missing, left over, of a wrong shape or in an unknown packing.
    """
    weights = stored_weights(checkpoint)  # refuses before anything is allocated
    model = _empty_model(checkpoint, device=device, dtype=dtype)
    parameters = dict(model.named_parameters())
    filled = _fill(parameters, checkpoint, weights, device)
    if missing := _missing(parameters, filled):
        shown = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
        raise _bad(checkpoint, f"{len(missing)} weights", f"missing: {shown}")
    return model.eval()


def _empty_model(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(
        checkpoint.folder, local_files_only=True, trust_remote_code=False
    )
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    # Buffers (rotary frequencies) are computed by the constructor, so it can't run on "meta".
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


@torch.no_grad()
def _fill(
    parameters: dict[str, torch.Tensor],
    checkpoint: Checkpoint,
    weights: list[StoredWeight],
    device: torch.device,
) -> set[Place]:
    prefix = base_tensor_names(checkpoint).layer_prefix.removesuffix("layers.")
    block = fp8_block(checkpoint)
    filled: set[Place] = set()
    for weight in track(weights, "reading the base", unit="tensor"):
        name = weight.name
        name = f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
        if name == "lm_head.weight" and name not in parameters:
            continue  # tied: logits use the embedding
        place = _place(name)
        target = _target(parameters, place)
        if target is None or place in filled or (place[0], None, "") in filled:
            found = "no place for it in the model, or one that is filled already"
            raise _bad(checkpoint, weight.name, found)
        value = load_weight(checkpoint, weight, device, block)
        if value.shape != target.shape:
            raise _bad(checkpoint, weight.name, f"{list(value.shape)}, not {list(target.shape)}")
        target.copy_(value)
        filled.add(place)
    return filled


def _place(name: str) -> Place:
    """Where a weight goes: transformers holds all experts of a layer in one tensor."""
    if found := _ONE_EXPERT.fullmatch(name):
        fused = "down_proj" if found[3] == "down" else "gate_up_proj"
        return f"{found[1]}.{fused}", int(found[2]), found[3]
    return name, None, ""


def _target(parameters: dict[str, torch.Tensor], place: Place) -> torch.Tensor | None:
    """The slice of a parameter to fill: gate rows come before up rows."""
    name, expert, projection = place
    whole = parameters.get(name)
    if whole is None or expert is None:
        return whole
    if expert >= whole.shape[0]:
        return None
    if projection == "down":
        return whole[expert]
    gate, up = whole[expert].chunk(2, dim=0)
    return gate if projection == "gate" else up


def _missing(parameters: dict[str, torch.Tensor], filled: set[Place]) -> list[str]:
    missing = []
    for name, parameter in parameters.items():
        projections = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
        kind = name.rpartition(".")[2]
        if (name, None, "") in filled:
            continue
        if ".experts." not in name or kind not in projections:
            missing.append(name)
            continue
        experts = name.removesuffix(f".{kind}")
        missing += [
            f"{experts}.{expert}.{projection}_proj"
            for expert in range(parameter.shape[0])
            for projection in projections[kind]
            if (name, expert, projection) not in filled
        ]
    return missing


def _bad(checkpoint: Checkpoint, subject: str, what: str) -> UserError:
    return UserError(
        f"each weight of the base once and whole in {checkpoint.folder}",
        f"{subject}: {what}",
        "use a complete checkpoint",
    )
