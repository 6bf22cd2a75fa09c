"""How the head is written onto this base: its tensors, its form, and what the configs then say.

One quantization method serves a whole checkpoint, so the base's decides in which form the head can
be stated at all. What can't be stated is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graft.config_patch import nvfp4_blocks, with_expert_algos, with_ignore, with_layer_count
from graft.convert import PlannedTensor, convert_head
from graft.formats import Form
from graft.ignore import derive_ignore
from graft.index import TensorInfo
from graft.manifest import HeadFolder
from graft.modules import is_multimodal, linear_modules
from graft.reader import Checkpoint
from graft.schemes import Statement, identify, read_statement

EXPERT_ALGOS: dict[Form, str] = {"nvfp4-modelopt": "NVFP4", "nvfp4-modelopt-w4a16": "W4A16_NVFP4"}


@dataclass(frozen=True, kw_only=True)
class PlannedHead:
    """The head as it will lie in the grafted checkpoint, and both configs around it."""

    form: Form
    tensors: tuple[PlannedTensor, ...]
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
    multimodal = is_multimodal(config)
    trunk = list(trunk)
    statement = read_statement(checkpoint)
    trunk_modules = linear_modules(trunk, multimodal)
    scheme = identify(statement, trunk_modules, str(checkpoint.folder))
    form = folder.form
    if form.startswith("nvfp4"):
        form = scheme.nvfp4_form(statement, trunk_modules, form)
    tensors = convert_head(folder.infos(), folder.form, form)
    if scheme.name == "none" and not form.startswith("nvfp4"):
        return PlannedHead(form=form, tensors=tensors, config=config, quant_file=None)
    statement = _with_head_stated(statement, form, folder.num_layers)
    modules = linear_modules([*trunk, *map(_as_info, tensors)], multimodal)
    ignore = derive_ignore(modules, scheme.rules(statement, multimodal))
    if scheme.name == "none":
        producer = (folder.metadata["quantization"] or {}).get("producer", {"name": "modelopt"})
        blocks = nvfp4_blocks(EXPERT_ALGOS[form], ignore, producer)
    else:
        blocks = with_ignore(statement.block, statement.file, ignore)
    block, file = blocks
    if block:
        nested = "quantization_config" not in config and statement.block is not None
        (config["text_config"] if nested else config)["quantization_config"] = block
    return PlannedHead(form=form, tensors=tensors, config=config, quant_file=file)


def _with_head_stated(statement: Statement, form: Form, num_layers: int) -> Statement:
    """A mixture names the algorithm of each layer: those of the head replace the old head's."""
    if statement.name != "modelopt MIXED_PRECISION":
        return statement
    algo = EXPERT_ALGOS.get(form)
    block = statement.block and with_expert_algos(statement.block, num_layers, algo)
    file = statement.file
    if file:
        inner = with_expert_algos(file.get("quantization", {}), num_layers, algo)
        file = {**file, "quantization": inner}
    read = with_expert_algos(statement.read, num_layers, algo)
    return replace(statement, block=block, file=file, read=read)


def _as_info(tensor: PlannedTensor) -> TensorInfo:
    """A planned tensor as a header would describe it; where it lies does not matter here."""
    if isinstance(tensor, TensorInfo):
        return tensor
    return TensorInfo(
        name=tensor.name, dtype=tensor.dtype, shape=tensor.shape,
        shard=Path(), offset=0, nbytes=tensor.nbytes,
    )  # fmt: skip
