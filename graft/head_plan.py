"""How the head is written onto this base: its tensors, its form, and what the configs then say.

One quantization method serves a whole checkpoint, so the base's decides in which form the head can
be stated at all. What can't be stated is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from graft.config_patch import nvfp4_blocks, with_ignore, with_layer_count
from graft.errors import UserError
from graft.formats import Form, describe_quantization, quantization_blocks
from graft.ignore import derive_ignore, is_multimodal, linear_modules
from graft.index import TensorInfo
from graft.manifest import HeadFolder
from graft.reader import Checkpoint


@dataclass(frozen=True, kw_only=True)
class PlannedHead:
    """The head as it will lie in the grafted checkpoint, and both configs around it."""

    form: Form
    tensors: tuple[TensorInfo, ...]
    config: dict[str, Any]
    quant_file: dict[str, Any] | None


def plan_head(
    checkpoint: Checkpoint,
    folder: HeadFolder,
    trunk: Iterable[TensorInfo],
    config: dict[str, Any],
) -> PlannedHead:
    """Decide the head's written form and state it in both configs.

    Args:
        checkpoint: the base; its quantization decides.
        folder: the head, complete and finite.
        trunk: the base's tensors that the graft keeps.
        config: the config.json to start from: the base's, or its text-only export.

    Raises:
        UserError: when the base's quantization can't express this head.
    """
    config = with_layer_count(config, folder.num_layers)
    block, file = quantization_blocks(checkpoint)
    tensors = tuple(folder.infos())
    if not block and not file and folder.form != "nvfp4-modelopt":
        return PlannedHead(form=folder.form, tensors=tensors, config=config, quant_file=None)
    stated = describe_quantization(checkpoint)
    if stated and (stated["method"], stated["algo"]) != ("modelopt", "NVFP4"):
        raise UserError(
            "an unquantized or modelopt NVFP4 base",
            f"{stated['method']} {stated['algo']} in {checkpoint.folder}",
            "use the BF16 base: this version cannot state a head's precision in that format",
        )
    multimodal = is_multimodal(config)
    modules = linear_modules([*trunk, *tensors], multimodal)
    existing = (block or {}).get("ignore") or (
        (file or {}).get("quantization", {}).get("exclude_modules", [])
    )
    ignore = derive_ignore(modules, existing, multimodal)
    if stated:
        new_block, new_file = with_ignore(block, file, ignore)
    else:
        producer = (folder.metadata["quantization"] or {}).get("producer", {"name": "modelopt"})
        new_block, new_file = nvfp4_blocks(ignore, producer)
    if new_block:
        place = config if "quantization_config" in config or not block else None
        (config["text_config"] if place is None else place)["quantization_config"] = new_block
    return PlannedHead(form=folder.form, tensors=tensors, config=config, quant_file=new_file)
