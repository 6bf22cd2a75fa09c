"""What must hold of a head before it is worked on: asked first, because the answer takes seconds
and calibration hours."""

from __future__ import annotations

from math import prod
from pathlib import Path

from graft.errors import UserError
from graft.formats import Form, head_tensors
from graft.head_check import shape_problems, value_problems
from graft.index import DTYPE_BITS
from graft.layout import Shape
from graft.manifest import HeadFolder
from graft.place import require_space
from graft.reader import MAX_NAMED


def require_plain_experts(source: HeadFolder) -> None:
    """Refuse what cannot be quantized.

    Raises:
        UserError: a head that is quantized already, has no routed experts, or is not sound.
    """
    if not source.form.startswith("bf16"):
        raise UserError(
            "a BF16 head", f"form {source.metadata['form']!r}", "quantize the head it was made from"
        )
    if not any(".mlp.experts." in name for name in source.names):
        raise UserError(
            "a head with routed experts", "a dense head", "graft it in BF16: it is small already"
        )
    require_sound(source)


def require_sound(source: HeadFolder) -> None:
    """Refuse a head that `mtp graft` would refuse.

    Raises:
        UserError: a tensor that is missing, left over, misshapen or not finite.
    """
    config = source.metadata["text_config"]
    problems = shape_problems(source, config, source.num_layers, source.form)
    if problems := problems or value_problems(source):
        raise UserError(
            f"a complete, finite {source.num_layers}-layer head in {source.folder}",
            f"{len(problems)} problems: {'; '.join(problems[:MAX_NAMED])}",
            "train or quantize the head again",
        )


def require_space_for(source: HeadFolder, form: Form, folder: Path) -> None:
    """Refuse a disk that cannot hold `source` in another form.

    Raises:
        UserError: naming both numbers.
    """
    wanted = head_tensors(source.metadata["text_config"], source.num_layers, form)
    require_space(folder, sum(_num_bytes(*tensor) for tensor in wanted.values()))


def _num_bytes(dtype: str, shape: Shape) -> int:
    return prod(shape) * DTYPE_BITS[dtype] // 8
