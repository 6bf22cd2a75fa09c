"""`mtp quantize --trunk`: the routed experts of a BF16 base to NVFP4, all else as it is.

Experts are nine tenths of such a base, and the head that is served beside them has to be stated in
the same quantization. W4A16 needs no data; W4A4 needs the base once in process, to see the inputs
of its experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from graft.errors import UserError
from graft.index import write_json
from graft.layout import base_tensor_names
from graft.place import Link
from graft.reader import Checkpoint
from graft.staging import staged_folder
from mtp.data.store import require_tokenizer_of
from mtp.progress import track
from mtp.router_load import RouterLoad
from mtp.teacher import Teacher
from quantize.calibration import Scheme, calibrate, quantized_experts, read_scales
from quantize.experts import ALGOS, calibration_rows, producer
from quantize.trunk_writer import REPORT, open_plain_base, write_trunk


def quantize_trunk(
    base: Path,
    out: Path,
    *,
    data: Path | None = None,
    scheme: Scheme | None = None,
    calibration_tokens: int = 0,
    device: str = "auto",
    link: Link = "auto",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write `base` with its routed experts in NVFP4.

    Args:
        base: an unquantized Qwen3.5-like base with experts.
        out: the folder to make.
        data: folder of `mtp data prepare`, whose training rows calibrate W4A4.
        scheme: "w4a16", or "w4a4" with `data`; by default what `data` allows.
        calibration_tokens: for W4A4.
        device: where the base runs, for W4A4.
        link: how shards without experts are placed.
        overwrite: replace an `out` that this command wrote.

    Returns:
        The report that also lies in the folder: scheme, matrices, bytes before and after, and for
        W4A4 the experts that no token reached.

    Raises:
        UserError: a base that is quantized already or has no experts, W4A4 without data, or an
            `out` that must not be written.
    """
    checkpoint = open_plain_base(base)
    scheme = scheme or ("w4a16" if data is None else "w4a4")
    if scheme == "w4a4" and data is None:
        raise UserError("--data to calibrate W4A4 on", "none", "name it, or pass --scheme w4a16")
    sources = [base] if data is None else [base, data]
    with staged_folder(out, overwrite=overwrite, sources=sources, mark=REPORT) as staging:
        amax: dict[str, float] = {}
        coverage: list[dict[str, Any]] = []
        if scheme == "w4a4" and data is not None:
            require_tokenizer_of(data, base)
            rows = calibration_rows(data, calibration_tokens)
            teacher = Teacher.load(base, device=device)
            amax, coverage = calibrate_trunk(checkpoint, teacher, rows)
            del teacher
        sizes = write_trunk(checkpoint, staging, ALGOS[scheme], amax, producer(), link)
        report = {
            "schema_version": 1,
            "base": str(base),
            "scheme": scheme,
            "producer": producer(),
            "coverage": coverage,
            **sizes,
        }
        write_json(staging / REPORT, report)
    return report


def calibrate_trunk(
    checkpoint: Checkpoint, teacher: Teacher, rows: Sequence[torch.Tensor]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The largest input of each layer's experts, for W4A4, watched by modelopt's quantizers.

    Args:
        checkpoint: the base; gives the names.
        teacher: the same base in process; its experts are wrapped, so it is of no use afterwards.
        rows: [1, T] token ids each.

    Returns:
        Amax by `PREFIX.experts.gate_up_proj` and `….down_proj`, and by layer {"layer",
        "never_routed"}: experts that no token reached, which share the layer's input scales.

    Raises:
        UserError: a layer whose experts saw no token.
    """
    prefix = base_tensor_names(checkpoint).layer_prefix
    teacher.model.set_experts_implementation("eager")
    load = RouterLoad(teacher.model.get_decoder())

    def read_rows(_: Any) -> None:
        for row in track(rows, "base reads", unit="row"):
            teacher.hidden(row)

    calibrate(teacher.model, read_rows, "w4a4")
    amax: dict[str, float] = {}
    for name, experts in quantized_experts(teacher.model):
        layer = re.search(r"layers\.(\d+)\.", name)
        assert layer is not None
        for projection, scales in read_scales(experts, "w4a4").items():
            assert scales.input_amax is not None
            amax[f"{prefix}{layer[1]}.mlp.experts.{projection}"] = scales.input_amax
    coverage = [{"layer": found.layer, "never_routed": found.unused()} for found in load.read()]
    return amax, coverage
