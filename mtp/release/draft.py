"""`mtp release draft`: a Hub-ready folder of a DSpark draft, the second part of a release.

A draft is served beside an unchanged base, so its folder holds no base: the card says that it does
nothing alone, and by which fingerprint the base that belongs to it is known. Nothing is uploaded.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from graft.errors import UserError
from graft.index import read_json, write_json
from graft.manifest import file_digest
from graft.reader import Checkpoint
from graft.staging import staged_folder
from mtp import __version__
from mtp.dspark.export import CONFIG, METADATA, WEIGHTS, load_draft, read_metadata
from mtp.release.files import require_licence, write_sums
from mtp.reports import read_report

TEMPLATE = Path(__file__).with_name("draft_card.md.jinja")


def build_draft_release(
    draft: Path,
    base: Path,
    out: Path,
    *,
    name: str,
    base_name: str,
    license_id: str,
    license_file: Path,
    evaluation: Path,
    served: Path | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Assemble the folder.

    Args:
        draft: the draft's folder.
        base: the base that it was trained on; it must have the draft's fingerprint.
        out: the folder to write.
        name: the draft's name, in the serve command.
        base_name: Hub name of the base, in the serve command and as the draft's verifier.
        license_id: the Hub's licence identifier.
        license_file: becomes LICENSE.
        evaluation: report of `mtp eval --draft`.
        served: report of benchmarks/dspark_h200/table.py, if it was served.
        overwrite: replace an existing `out`.

    Returns:
        The files' names.

    Raises:
        UserError: a broken draft, one of another base, no licence file, no such report, or the
            evaluation of another draft.
    """
    load_draft(draft, Checkpoint(base))
    require_licence(license_file)
    report = _evaluation(evaluation, draft)
    num_positions = len(report["cumulative"])
    card = render_draft_card(
        draft, name=name, base_name=base_name, license_id=license_id, evaluation=report,
        served=None if served is None else _served(served, draft, num_positions),
    )  # fmt: skip
    config = read_json(draft / CONFIG)
    config["speculators_config"]["verifier"]["name_or_path"] = base_name
    with staged_folder(out, overwrite=overwrite, sources=[draft, base], mark=METADATA) as staging:
        write_json(staging / CONFIG, config)
        for file in (WEIGHTS, METADATA):
            shutil.copyfile(draft / file, staging / file)
        (staging / "README.md").write_text(card)
        shutil.copyfile(license_file, staging / "LICENSE")
        return write_sums(staging)


def _evaluation(path: Path, draft: Path) -> dict[str, Any]:
    """The report of `mtp eval --draft` on these very weights."""
    report = read_report(path, "teacher_forced")
    _require_acceptance(report, path, "num_prompts")
    _require_weights(report, path, draft)
    return report


def _served(path: Path, draft: Path, num_positions: int) -> tuple[str, dict[str, Any]]:
    """vLLM's version, and what it counted of these very weights."""
    report = read_report(path, "variants")
    variants = report["variants"] if isinstance(report["variants"], dict) else {}
    # Beside the draft there are the base alone and the MTP head.
    found = [value for name, value in variants.items() if name.startswith("dspark")]
    if "vllm_version" not in report or not found or not isinstance(found[0], dict):
        raise UserError(
            "a report of benchmarks/dspark_h200/table.py, with a draft that was served",
            f"{path} without",
            "name the right report",
        )
    metrics = found[0].get("acceptance") or {}
    _require_acceptance(metrics, path)
    _require_weights(found[0].get("predicted") or {}, path, draft)
    if len(metrics["cumulative"]) != num_positions:
        raise UserError(
            f"as many positions served as evaluated, {num_positions}",
            f"{path} with {len(metrics['cumulative'])}",
            "serve and evaluate with the same num_speculative_tokens",
        )
    return report["vllm_version"], metrics


def _require_weights(report: dict[str, Any], path: Path, draft: Path) -> None:
    if report.get("draft_sha256", digest := file_digest(draft / WEIGHTS)) != digest:
        raise UserError(
            f"a report on the draft in {draft}",
            f"{path}, of other weights",
            f"run `mtp eval --draft {draft} --report` again, and serve this one",
        )


def _require_acceptance(metrics: dict[str, Any], path: Path, *others: str) -> None:
    wanted = ("mean_accepted", "cumulative", "num_drafts", *others)
    if missing := [key for key in wanted if key not in metrics]:
        raise UserError(
            f"a report with {', '.join(wanted)}",
            f"{path} without {', '.join(missing)}",
            "name the right report",
        )


def draft_serve_command(name: str, base_name: str, num_tokens: int) -> str:
    """The line that serves the base with the draft beside it."""
    speculative = {"method": "dspark", "model": name, "num_speculative_tokens": num_tokens}
    parts = [base_name, "--speculative-config", json.dumps(speculative)]
    return f"vllm serve {shlex.join(parts)}"


def fingerprint_digest(fingerprint: dict[str, Any]) -> str:
    """SHA-256 of a base's fingerprint, as hex."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()


def render_draft_card(
    draft: Path,
    *,
    name: str,
    base_name: str,
    license_id: str,
    evaluation: dict[str, Any],
    served: tuple[str, dict[str, Any]] | None,
) -> str:
    """The card's text, front matter included."""
    from huggingface_hub import ModelCard, ModelCardData

    metadata, config = read_metadata(draft), read_json(draft / CONFIG)
    provenance = metadata["provenance"]
    num_tokens = len(evaluation["cumulative"])
    card_data = ModelCardData(
        license=license_id,
        base_model=base_name,
        base_model_relation="adapter",
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "speculators", "dspark", "mtp-graft"],
    )
    rows = [("predicted", evaluation)]
    if served is not None:
        version, metrics = served
        rows.append((f"served, vLLM {version}", metrics))
    card = ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        name=name,
        base_name=base_name,
        serve_command=draft_serve_command(name, base_name, num_tokens),
        num_tokens=num_tokens,
        fingerprint=fingerprint_digest(metadata["base_fingerprint"]),
        tensors=metadata["base_fingerprint"]["tensor_sha256"],
        rows=rows,
        evaluation=evaluation,
        num_layers=config["transformer_layer_config"]["num_hidden_layers"],
        config=config,
        tool=f"mtp-graft {__version__}",
        tokens=provenance.get("tokens", "an unrecorded number of"),
        licences=", ".join(provenance.get("licences", [])) or "not recorded",
        licences_by_source=provenance.get("licences_by_source", {}),
    )
    return str(card)
