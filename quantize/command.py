"""`mtp quantize`: a head's routed experts to NVFP4, everything else stays BF16.

Measure, calibrate, pack, check what was written, measure again, and let the gate decide. A head
that fails the gate is not written: the BF16 one drafts better, and it exists already.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from graft.errors import UserError
from graft.formats import Form, dequantize_head
from graft.index import write_json
from graft.manifest import HEAD_METADATA, HeadFolder, write_head
from graft.reader import Checkpoint
from graft.staging import staged_folder
from mtp.acceptance import Continuations, Runtime, continue_prompts, trained_for
from mtp.data.prompts import evaluation_prompts
from mtp.data.store import require_tokenizer_of
from mtp.head import open_head
from mtp.recipe import Recipe
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
from quantize.gate import GateFailed, Replay, drops_too_far, paired_difference, replay_head

SCHEMA_VERSION = 2  # 2: difference, passed, scheme, coverage
FORMS: dict[Scheme, Form] = {"w4a4": "nvfp4-modelopt", "w4a16": "nvfp4-modelopt-w4a16"}
MAX_DROP = 0.01


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for. scheme: None matches the base."""

    scheme: Scheme | None = None
    algorithm: Algorithm = "max"
    max_drop: float = MAX_DROP
    qad_steps: int = 0


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
        UserError: a head without routed experts or already quantized, or a base that it was not
            trained on.
    """
    source, checkpoint = HeadFolder(head_folder), Checkpoint(base)
    _require_plain_experts(source)
    with staged_folder(
        out, overwrite=overwrite, sources=[head_folder, base, data], mark=HEAD_METADATA
    ) as staging:
        open_head(head_folder, checkpoint)
        require_tokenizer_of(data, base)
        scheme = settings.scheme or matching_scheme(checkpoint)
        teacher = Teacher.load(base, device=device)
        require_algorithm(settings.algorithm, teacher.device)
        prompts = evaluation_prompts(
            data,
            num_prompts=recipe.eval.num_prompts,
            max_prompt_tokens=recipe.eval.max_prompt_tokens,
        )
        num_steps, runtime = trained_for(source)
        text = continue_prompts(teacher, prompts, recipe.eval.num_tokens, num_steps)
        rows = calibration_rows(data, recipe.quantize.calibration_tokens)
        job = _Job(teacher, text, num_steps, runtime, recipe, scheme, settings.algorithm, rows)
        before = replay_head(teacher, source, text, num_steps, runtime)
        result = job.attempt(source, staging, before)
        if drops_too_far(result["difference"], settings.max_drop) and settings.qad_steps:
            from quantize.qad import distil

            with tempfile.TemporaryDirectory(dir=staging) as workspace:
                trained = distil(
                    source, checkpoint, teacher, data, rows, Path(workspace), recipe, text,
                    before.metrics, scheme=scheme, num_steps=settings.qad_steps,
                )  # fmt: skip
                first = result
                result = job.attempt(trained, staging, before)
            result["qad"] = {"steps": settings.qad_steps, "after_without": first["after"],
                             "difference_without": first["difference"]}  # fmt: skip
        result |= {
            "bytes_before": sum(info.nbytes for info in source.infos()),
            "max_drop": settings.max_drop,
            "passed": not drops_too_far(result["difference"], settings.max_drop),
        }
        if not result["passed"]:
            raise _gate_failed(result, settings, head_folder)
    return result


@dataclass(frozen=True)
class _Job:
    """What all attempts at one head have in common."""

    teacher: Teacher
    text: Continuations
    num_steps: int
    runtime: Runtime
    recipe: Recipe
    scheme: Scheme
    algorithm: Algorithm
    rows: list[torch.Tensor]

    def attempt(self, source: HeadFolder, folder: Path, before: Replay) -> dict[str, Any]:
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
            "before": before.metrics,
            "after": after.metrics,
            "difference": paired_difference(before.counts, after.counts),
            "coverage": coverage,
            "checks": checks,
            "bytes_after": num_bytes,
        }


def dequantize(head_folder: Path, out: Path, *, overwrite: bool = False) -> None:
    """Write the BF16 twin of an NVFP4 head: for engines without NVFP4 kernels, as on a CPU.

    Raises:
        UserError: the head is not NVFP4.
    """
    source = HeadFolder(head_folder)
    if not source.form.startswith("nvfp4"):
        raise UserError(
            "an NVFP4 head", f"form {source.metadata['form']!r}", "use it as it is: it is BF16"
        )
    with staged_folder(
        out, overwrite=overwrite, sources=[head_folder], mark=HEAD_METADATA
    ) as staging:
        tensors = dequantize_head(source.load_all())
        metadata = {**source.metadata, "form": "bf16-per-expert", "quantization": None}
        write_head(staging, tensors, metadata)


def _gate_failed(result: dict[str, Any], settings: Settings, head_folder: Path) -> GateFailed:
    difference = result["difference"]
    low, high = (-value for value in reversed(difference["mean_accepted_interval"]))
    found = f"{-difference['mean_accepted']:.4f} (95 % interval {low:.4f} to {high:.4f})"
    action = f"serve {head_folder} in BF16"
    if not settings.qad_steps:
        action += ", or pass --qad N to distil it with quantized experts"
    return GateFailed(
        f"a drop of at most {settings.max_drop} mean accepted", found, action, result=result
    )


def _require_plain_experts(source: HeadFolder) -> None:
    if not source.form.startswith("bf16"):
        raise UserError(
            "a BF16 head", f"form {source.metadata['form']!r}", "quantize the head it was made from"
        )
    if not any(".mlp.experts." in name for name in source.names):
        raise UserError(
            "a head with routed experts", "a dense head", "graft it in BF16: it is small already"
        )
