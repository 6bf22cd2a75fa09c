"""The model card: YAML front matter, the serve command, and acceptance from the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graft.layout import count_head_layers
from graft.manifest import read_manifest
from graft.reader import Checkpoint
from mtp.recipe import trained_for

TEMPLATE = Path(__file__).with_name("card.md.jinja")
HEAD_FORMS = {
    "bf16-fused": "BF16",
    "bf16-per-expert": "BF16",
    "nvfp4-modelopt": "NVFP4 routed experts (nvidia-modelopt), all else BF16",
    "nvfp4-modelopt-w4a16": "NVFP4 routed experts (W4A16, modelopt's names), all else BF16",
    "nvfp4-compressed-tensors": "NVFP4 routed experts (compressed-tensors), all else BF16",
    "nvfp4-compressed-tensors-w4a16":
        "NVFP4 routed experts (W4A16, compressed-tensors), all else BF16",
}  # fmt: skip


def serve_command(name: str, num_tokens: int) -> str:
    """The line that serves the model with so many drafted tokens a round."""
    return (
        f"vllm serve {name} --speculative-config "
        f'\'{{"method": "mtp", "num_speculative_tokens": {num_tokens}}}\''
    )


def render_card(
    checkpoint: Path,
    *,
    name: str,
    license_id: str,
    base_model: str | None,
    evaluation: dict[str, Any] | None,
    served: dict[str, Any] | None,
    tool: str,
) -> str:
    """The card's text, front matter included."""
    from huggingface_hub import ModelCard, ModelCardData

    source = Checkpoint(checkpoint)
    manifest = read_manifest(checkpoint)
    head = manifest["head"]
    quantized = head["form"].startswith("nvfp4")
    card_data = ModelCardData(
        license=license_id,
        base_model=base_model,
        base_model_relation="finetune" if base_model else None,
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "mtp", "mtp-graft", *(["nvfp4"] if quantized else [])],
    )
    num_layers = count_head_layers(source.names)
    rows, how = acceptance_rows(evaluation, served)
    config, provenance = source.text_config, head["provenance"]
    num_tokens, _ = trained_for(provenance, num_layers)
    card = ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        name=name,
        num_layers=num_layers,
        head_form=HEAD_FORMS[head["form"]],
        tool=tool,
        num_tokens=num_tokens,
        serve_command=serve_command(name, num_tokens),
        rows=rows,
        measured_how=how,
        hidden_size=config["hidden_size"],
        num_hidden_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        mismatches=manifest["allowed_mismatches"],
        tokens=provenance.get("tokens", "an unrecorded number of"),
        licences=", ".join(provenance.get("licences", [])) or "not recorded",
        licences_by_source=provenance.get("licences_by_source", {}),
    )
    return str(card)


def acceptance_rows(
    evaluation: dict[str, Any] | None, served: dict[str, Any] | None
) -> tuple[list[dict[str, Any]], str]:
    """Rows of the card's table, and a sentence on how they were measured."""
    rows, how = [], []
    if evaluation is not None:
        pairs = (
            [("predicted, BF16 head", evaluation["before"]),
             ("predicted, NVFP4 experts dequantized", evaluation["after"])]
            if "after" in evaluation
            else [("predicted", evaluation)]
        )  # fmt: skip
        rows += [{"label": label, "metrics": metrics} for label, metrics in pairs]
        how.append(
            f"Predicted: speculative decoding replayed on the base's own greedy continuations of "
            f"{pairs[0][1]['num_prompts']} held-out prompts."
        )
    if served is not None:
        rows += [
            {"label": f"served, {row['label']}", "metrics": row}
            for row in served["rows"]
            if not row.get("predicted")
        ]
        how.append(f"Served: vLLM {served['vllm_version']}, greedy, its own counters.")
    return rows, " ".join(how)
