"""A draft's folder: what `speculators` 0.9.0 loads and vLLM 0.33 serves, and where it comes from.

    config.json         shape and proposal, in the schema of speculators
    model.safetensors   BF16; the base's embedding is not repeated: both loaders take the base's
    draft.json          base fingerprint, provenance, acceptance; other loaders don't look at it

`auto_map` and `config.py`, which speculators' own writer leaves behind, are not written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from graft.errors import UserError
from graft.index import read_json, write_json
from graft.manifest import base_fingerprint, fingerprint_differences
from graft.reader import Checkpoint
from mtp.dspark.config import DSparkConfig, from_json, to_json
from mtp.dspark.model import DSparkModel
from mtp.dspark.vocabulary import DraftVocabulary

CONFIG, WEIGHTS, METADATA = "config.json", "model.safetensors", "draft.json"
SCHEMA_VERSION = 1


def save_draft(
    folder: Path,
    config: DSparkConfig,
    weights: Mapping[str, torch.Tensor],
    vocabulary: DraftVocabulary,
    *,
    base: Checkpoint,
    fingerprint: Mapping[str, Any],
    provenance: Mapping[str, Any],
    acceptance: Mapping[str, Any] | None,
) -> None:
    """Write a draft into `folder`, which exists.

    Args:
        folder: to fill.
        config: the shape.
        weights: by the names of `DSparkModel`.
        vocabulary: what the draft can say.
        base: the base's checkpoint; its folder is what speculators reads the embedding from.
        fingerprint: of the base.
        provenance: how it was made.
        acceptance: measured.
    """
    values = to_json(
        config,
        verifier=str(base.folder.resolve()),
        verifier_architectures=list(base.config.get("architectures") or []),
    )
    write_json(folder / CONFIG, values)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    if config.has_draft_vocabulary:
        tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    metadata = {
        "schema_version": SCHEMA_VERSION, "kind": "dspark", "base_fingerprint": dict(fingerprint),
        "provenance": dict(provenance), "acceptance": acceptance and dict(acceptance),
    }  # fmt: skip
    write_json(folder / METADATA, metadata)


def is_draft(folder: Path) -> bool:
    """Whether a folder holds a DSpark draft, of whatever origin."""
    try:
        values = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("speculators_model_type") == "dspark"


def read_metadata(folder: Path) -> dict[str, Any]:
    """draft.json.

    Raises:
        UserError: none, or not of this version.
    """
    expected = f"a DSpark draft trained here, in {folder}"
    if not (folder / METADATA).is_file():
        raise UserError(expected, f"no {METADATA}", "train one with `mtp train --draft dspark`")
    metadata = read_json(folder / METADATA)
    if metadata.get("schema_version") != SCHEMA_VERSION or "base_fingerprint" not in metadata:
        raise UserError(expected, f"another {METADATA}", "train it with this version")
    return metadata


def load_draft(folder: Path, base: Checkpoint | None = None) -> tuple[DSparkModel, DraftVocabulary]:
    """The model, in float32, and what it can say.

    Args:
        folder: a draft's.
        base: the base that it is for; refused if it was trained on another.

    Raises:
        UserError: a broken folder, or a draft of another base.
    """
    config = from_json(read_json(folder / CONFIG))
    if base is not None:
        trained_on = read_metadata(folder)["base_fingerprint"]
        if found := fingerprint_differences(trained_on, base_fingerprint(base)):
            raise UserError(
                f"the base that the draft in {folder} was trained on",
                "; ".join(found[:5]).replace("head was", "draft was"),
                "name that base, or train a draft for this one",
            )
    model = DSparkModel(config)
    try:
        tensors = load_file(folder / WEIGHTS)
        offsets = tensors.pop("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
        tensors.pop("t2d", None)
        tensors.pop("embed_tokens.weight", None)  # the base's, in drafts of other trainers
        model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(
            f"a draft's weights in {folder / WEIGHTS}",
            str(error).split("\n")[0][:200],
            "train it again",
        ) from error
    return model, DraftVocabulary.from_offsets(offsets, config.vocab_size)
