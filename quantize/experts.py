"""`mtp quantize`: the routed experts to NVFP4, everything else stays BF16.

nvidia-modelopt calibrates and packs. Only the routed experts are quantized: they are 96 % of the
head's bytes at the 35B's sizes, and public reports of wholly quantized drafters lost acceptance.
The head itself is the root module, because modelopt's stock recipes disable whatever is named
`mtp`, and the experts run eagerly, because modelopt finds an expert's weight by its storage offset.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graft.errors import UserError
from graft.formats import dequantize_head
from graft.index import write_json
from graft.manifest import HEAD_METADATA, HeadFolder, write_head
from graft.reader import Checkpoint
from graft.staging import staged_folder
from mtp.acceptance import continue_prompts, measure, trained_for
from mtp.data.prompts import evaluation_prompts
from mtp.data.store import load_prepared, require_tokenizer_of
from mtp.head import MTPHead, load_head, open_head
from mtp.progress import track
from mtp.recipe import Recipe
from mtp.teacher import Teacher

# FP4 E2M1 values, blocks of 16 along the input dimension, FP8 E4M3 block scales.
NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
QUANTIZERS = [
    {"quantizer_name": "*", "enable": False},
    # The trailing * matters: one weight quantizer an expert, in a list.
    {"quantizer_name": "*mlp.experts.*weight_quantizer*", "cfg": NVFP4},
    {"quantizer_name": "*mlp.experts.*input_quantizer", "cfg": NVFP4},
]


def quantize(
    head_folder: Path,
    base: Path,
    data: Path,
    out: Path,
    recipe: Recipe,
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
        recipe: calibration tokens and evaluation prompts.
        device: where to calibrate.
        overwrite: replace an existing `out`.

    Returns:
        {"before": metrics, "after": metrics, "bytes_before": int, "bytes_after": int}. "after"
        is measured with dequantized weights and unquantized activations.

    Raises:
        UserError: a head without routed experts or already quantized, or a base that it was not
            trained on.
    """
    source = HeadFolder(head_folder)
    _require_plain_experts(source)
    with staged_folder(
        out, overwrite=overwrite, sources=[head_folder, base, data], mark=HEAD_METADATA
    ) as staging:
        open_head(head_folder, Checkpoint(base))
        require_tokenizer_of(data, base)
        teacher = Teacher.load(base, device=device)
        prompts = evaluation_prompts(
            data,
            num_prompts=recipe.eval.num_prompts,
            max_prompt_tokens=recipe.eval.max_prompt_tokens,
        )
        head = load_head(head_folder, experts_implementation="eager").to(teacher.device)
        num_steps, runtime = trained_for(source)
        text = continue_prompts(teacher, prompts, recipe.eval.num_tokens, num_steps)
        before = measure(teacher, head, text, num_steps=num_steps, runtime=runtime)

        texts = calibration_rows(data, recipe.quantize.calibration_tokens)
        tensors, config = quantize_experts(head, teacher, texts)
        trained = source.metadata
        metadata = {
            **trained,
            "form": "nvfp4-modelopt",
            "quantization": config,
            "provenance": {**trained["provenance"], "calibration": asdict(recipe.quantize)},
        }
        write_head(staging, tensors, metadata)
        quantized = load_head(staging).to(teacher.device)
        after = measure(teacher, quantized, text, num_steps=num_steps, runtime=runtime)
        write_json(staging / HEAD_METADATA, {**metadata, "acceptance": after})
        bytes_after = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "before": before,
        "after": after,
        "bytes_before": sum(source.info(name).nbytes for name in source.names),
        "bytes_after": bytes_after,
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


def calibration_rows(data: Path, num_tokens: int) -> list[torch.Tensor]:
    """[1, T] token ids of training rows, `num_tokens` or a little more where the data has them.

    Single rows: padding would be calibrated on as if it were text.
    """
    chosen, seen = [], 0
    for row in load_prepared(data)["train"].shuffle(seed=0):
        chosen.append(torch.tensor(row["input_ids"]).unsqueeze(0))
        seen += chosen[-1].numel()
        if seen >= num_tokens:
            break
    return chosen


def quantize_experts(
    head: MTPHead, teacher: Teacher, texts: list[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Calibrate with each layer's own inputs in the chain, and pack.

    Args:
        head: with eager experts; it is consumed.
        teacher: gives the hidden states that the chain starts from.
        texts: [B, T] token ids without padding.

    Returns:
        Tensors of the NVFP4 head under `mtp.*`, per expert, and modelopt's configuration.

    Raises:
        UserError: modelopt left an expert without a usable scale.
    """
    with _quiet():
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.moe_utils import _export_fused_experts

        @torch.no_grad()
        def forward_loop(model: MTPHead) -> None:
            for input_ids in track(texts, "calibrating", unit="row"):
                hidden = teacher.hidden(input_ids).float()
                model.chain(hidden, teacher.embed(input_ids).float())

        head.eval()
        mtq.quantize(head, {"quant_cfg": QUANTIZERS, "algorithm": "max"}, forward_loop)
        for layer in track(head.layers, "packing", unit="layer"):
            _export_fused_experts(layer.mlp.experts, torch.bfloat16)

    tensors = {}
    for name, tensor in head.state_dict().items():
        kept = tensor if _is_nvfp4_part(name) else tensor.to(torch.bfloat16)
        tensors[f"mtp.{name}"] = kept.detach().cpu().contiguous()
    _require_sound_scales(tensors)
    config = {"quant_algo": "NVFP4", "group_size": 16, "producer": producer()}
    return tensors, config


def _is_nvfp4_part(name: str) -> bool:
    return ".mlp.experts." in name


def _require_plain_experts(source: HeadFolder) -> None:
    if not source.form.startswith("bf16"):
        raise UserError(
            "a BF16 head", f"form {source.metadata['form']!r}", "quantize the head it was made from"
        )
    if not any(".mlp.experts." in name for name in source.names):
        raise UserError(
            "a head with routed experts", "a dense head", "graft it in BF16: it is small already"
        )


def _require_sound_scales(tensors: dict[str, torch.Tensor]) -> None:
    packed = [n for n in tensors if _is_nvfp4_part(n) and n.endswith(".weight")]
    if not packed or any(tensors[n].dtype != torch.uint8 for n in packed):
        raise UserError(
            "packed uint8 expert weights",
            f"{len(packed)} expert weights of other types",
            "report this: modelopt did not apply the format",
        )
    for weight in packed:
        for scale in ("weight_scale", "weight_scale_2", "input_scale"):
            name = f"{weight}"[: -len("weight")] + scale
            value = tensors.get(name)
            sound = value is not None and bool(
                (torch.isfinite(value.float()) & (value.float() > 0)).all()
            )
            if not sound:
                raise UserError(
                    f"a finite {name} above 0",
                    "none" if value is None else "zero, negative or not finite values",
                    "calibrate with more tokens",
                )


def producer() -> dict[str, str]:
    """Whose format this is, for the configs that name it."""
    from importlib.metadata import version

    return {"name": "modelopt", "version": version("nvidia-modelopt")}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """modelopt prints to stdout, which is for `--json`, and warns of newer versions."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
