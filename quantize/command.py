"""`mtp quantize`: a head's routed experts to NVFP4, everything else stays BF16.

Measure, calibrate, pack, check what was written, measure again, and let the gate decide. A head
that fails the gate is not written: the BF16 one drafts better, and it exists already.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from graft.errors import UserError
from graft.formats import Form
from graft.index import write_json
from graft.manifest import HEAD_METADATA, HeadFolder, write_head
from graft.reader import Checkpoint
from graft.staging import staged_folder
from mtp.acceptance import Continuations, Runtime, continue_prompts
from mtp.data.prompts import evaluation_prompts
from mtp.data.store import require_tokenizer_of
from mtp.head import open_head
from mtp.recipe import Recipe, trained_for
from mtp.teacher import Teacher
from quantize.calibration import Algorithm, Scheme, require_algorithm
from quantize.checks import check_written
from quantize.experts import (
    ALGOS,
    calibrate_head,
    calibration_rows,
    matching_scheme,
    pack_head,
    producer,
)
from quantize.gate import (
    GateFailed,
    Replay,
    drops_too_far,
    paired_difference,
    replay_head,
    require_evidence,
)
from quantize.head_source import require_plain_experts, require_space_for

SCHEMA_VERSION = 2  # 2: difference, passed, scheme, coverage
FORMS: dict[Scheme, Form] = {"w4a4": "nvfp4-modelopt", "w4a16": "nvfp4-modelopt-w4a16"}
MAX_DROP = 0.01


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for. scheme: None matches the base.

    Raises:
        UserError: a `max_drop` that is no number, with which no drop would be too large.
    """

    scheme: Scheme | None = None
    algorithm: Algorithm = "max"
    max_drop: float = MAX_DROP
    qad_steps: int = 0

    def __post_init__(self) -> None:
        if math.isnan(self.max_drop):
            raise UserError("a number for --max-drop", "nan", "pass the drop that you can bear")


def quantize(
    head_folder: Path,
    base: Path,
    data: Path,
    out: Path,
    recipe: Recipe,
    settings: Settings = Settings(),
    *,
    device: str = "auto",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Quantize a head's experts and measure acceptance before and after.

    Args:
        head_folder: a BF16 head.
        base: the base that it was trained on: calibration runs on its hidden states.
        data: folder of `mtp data prepare`; training rows calibrate, held-out prompts measure.
        out: the head folder to write.
        recipe: calibration tokens and evaluation prompts; with QAD also loss and training.
        settings: format, algorithm, and what the gate lets through.
        device: where to calibrate.
        overwrite: replace an existing `out`.

    Returns:
        "before" and "after" as `mtp eval` reports them, "difference" with its interval, what
        calibration covered and the checks found, bytes. "after" is measured with dequantized
        weights and unquantized activations.

    Raises:
        GateFailed: acceptance fell too far; nothing is written, and the BF16 head stays.
        UserError: a head without routed experts or already quantized, a base that it was not
            trained on, or held-out prompts that can prove nothing.
    """
    source, checkpoint = HeadFolder(head_folder), Checkpoint(base)
    with staged_folder(
        out, overwrite=overwrite, sources=[head_folder, base, data], mark=HEAD_METADATA
    ) as staging:
        require_plain_experts(source)
        open_head(head_folder, checkpoint)
        require_tokenizer_of(data, base)
        scheme = settings.scheme or matching_scheme(checkpoint)
        require_space_for(source, FORMS[scheme], staging)
        job = _prepare(source, checkpoint, data, recipe, scheme, settings.algorithm, device)
        result = job.attempt(source, staging)
        if drops_too_far(result["difference"], settings.max_drop) and settings.qad_steps:
            result = _distilled(job, source, staging, result, settings.qad_steps)
        result |= {
            "bytes_before": sum(info.nbytes for info in source.infos()),
            "max_drop": settings.max_drop,
            "passed": not drops_too_far(result["difference"], settings.max_drop),
        }
        if not result["passed"]:
            raise _gate_failed(result, settings, head_folder)
    return result


def _prepare(
    source: HeadFolder,
    checkpoint: Checkpoint,
    data: Path,
    recipe: Recipe,
    scheme: Scheme,
    algorithm: Algorithm,
    device: str,
) -> _Job:
    """Load the base, let it continue the held-out prompts, and measure the BF16 head on them."""
    teacher = Teacher.load(checkpoint.folder, device=device)
    require_algorithm(algorithm, teacher.device)
    prompts = evaluation_prompts(
        data,
        num_prompts=recipe.eval.num_prompts,
        max_prompt_tokens=recipe.eval.max_prompt_tokens,
    )
    num_steps, runtime = trained_for(source.metadata["provenance"], source.num_layers)
    text = continue_prompts(teacher, prompts, recipe.eval.num_tokens, num_steps)
    before = replay_head(teacher, source, text, num_steps, runtime)
    require_evidence(before)
    return _Job(
        checkpoint=checkpoint, teacher=teacher, data=data, text=text, before=before,
        num_steps=num_steps, runtime=runtime, recipe=recipe, scheme=scheme, algorithm=algorithm,
        rows=calibration_rows(data, recipe.quantize.calibration_tokens),
    )  # fmt: skip


def _distilled(
    job: _Job, source: HeadFolder, staging: Path, first: dict[str, Any], num_steps: int
) -> dict[str, Any]:
    """Train the head with quantized experts, and try again; `first` is what it got without."""
    from quantize.qad import distil

    with tempfile.TemporaryDirectory(dir=staging) as workspace:
        trained = distil(
            source, job.checkpoint, job.teacher, job.data, job.rows, Path(workspace), job.recipe,
            job.text, job.before.metrics, scheme=job.scheme, num_steps=num_steps,
        )  # fmt: skip
        result = job.attempt(trained, staging)
    return result | {
        "qad": {
            "steps": num_steps,
            "after_without": first["after"],
            "difference_without": first["difference"],
        }
    }


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all attempts at one head have in common."""

    checkpoint: Checkpoint
    teacher: Teacher
    data: Path
    text: Continuations
    before: Replay
    num_steps: int
    runtime: Runtime
    recipe: Recipe
    scheme: Scheme
    algorithm: Algorithm
    rows: list[torch.Tensor]

    def attempt(self, source: HeadFolder, folder: Path) -> dict[str, Any]:
        """Calibrate, pack, write into `folder`, check, and measure."""
        scales, coverage = calibrate_head(
            source, self.teacher, self.rows, self.scheme, self.algorithm,
            num_steps=self.num_steps, runtime=self.runtime,
        )  # fmt: skip
        tensors = pack_head(source, scales)
        trained = source.metadata
        calibration = asdict(self.recipe.quantize) | {"algorithm": self.algorithm}
        metadata = {
            **trained,
            "form": FORMS[self.scheme],
            "quantization": {
                "quant_algo": ALGOS[self.scheme], "group_size": 16, "producer": producer(),
            },
            "provenance": {**trained["provenance"], "calibration": calibration},
        }  # fmt: skip
        write_head(folder, tensors, metadata)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        del tensors
        written = HeadFolder(folder)
        checks = check_written(written, source, own_scales=self.algorithm == "max")
        after = replay_head(self.teacher, written, self.text, self.num_steps, self.runtime)
        write_json(folder / HEAD_METADATA, {**metadata, "acceptance": after.metrics})
        return {
            "schema_version": SCHEMA_VERSION,
            "scheme": self.scheme,
            "algorithm": self.algorithm,
            "before": self.before.metrics,
            "after": after.metrics,
            "difference": paired_difference(self.before.counts, after.counts),
            "coverage": coverage,
            "checks": checks,
            "bytes_after": num_bytes,
        }


def _gate_failed(result: dict[str, Any], settings: Settings, head_folder: Path) -> GateFailed:
    difference = result["difference"]
    low, high = (0 - value for value in reversed(difference["mean_accepted_interval"]))
    found = f"{0 - difference['mean_accepted']:.4f} (95 % interval {low:.4f} to {high:.4f})"
    action = f"serve {head_folder} in BF16"
    if not settings.qad_steps:
        action += ", or pass --qad N to distil it with quantized experts"
    return GateFailed(
        f"a drop of at most {settings.max_drop} mean accepted", found, action, result=result
    )
