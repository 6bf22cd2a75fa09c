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
from safetensors.torch import load_file

from graft.errors import UserError
from graft.index import read_json, write_json
from graft.manifest import HEAD_METADATA, base_fingerprint, fingerprint_differences
from graft.reader import Checkpoint
from graft.tensor_file import save_tensors
from mtp.dspark.config import DSparkConfig
from mtp.dspark.config_json import from_json, to_json
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
    save_tensors(tensors, folder / WEIGHTS)
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
        UserError: none, not of this version, or not all of it.
    """
    expected = f"a DSpark draft trained here, in {folder}"
    if not (folder / METADATA).is_file():
        raise UserError(expected, f"no {METADATA}", "train one with `mtp train --draft dspark`")
    metadata = read_json(folder / METADATA)
    whole = all(isinstance(metadata.get(key), dict) for key in ("base_fingerprint", "provenance"))
    if metadata.get("schema_version") != SCHEMA_VERSION or not whole:
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
    if (folder / HEAD_METADATA).is_file() and not (folder / CONFIG).exists():
        raise UserError(
            f"a DSpark draft's folder at {folder}", f"a head ({HEAD_METADATA})", "pass it as --head"
        )
    config = from_json(read_json(folder / CONFIG), folder / CONFIG)
    if base is not None:
        _require_base(folder, config, base)
    model = DSparkModel(config)
    try:
        tensors = load_file(folder / WEIGHTS)
        tensors.pop("embed_tokens.weight", None)  # the base's, in drafts of other trainers
        d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
        model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        broken = [
            name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()
        ]
        problem = (
            f"{broken[0]} that is not finite" if broken else _mapping_problem(config, d2t, t2d)
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        problem = " ".join(str(error).split())[:200]
    if problem:
        raise UserError(
            f"a draft's weights in {folder / WEIGHTS}", problem, "restore it, or train it again"
        )
    offsets = torch.zeros(config.vocab_size, dtype=torch.int64) if d2t is None else d2t
    return model, DraftVocabulary.from_offsets(offsets, config.vocab_size)


def _require_base(folder: Path, config: DSparkConfig, base: Checkpoint) -> None:
    """Refuse a base that the draft was not trained on, or a config.json of another shape."""
    trained_on = read_metadata(folder)["base_fingerprint"]
    if found := fingerprint_differences(trained_on, base_fingerprint(base)):
        raise UserError(
            f"the base that the draft in {folder} was trained on",
            "; ".join(found[:5]).replace("head was", "draft was"),
            "name that base, or train a draft for this one",
        )
    text_config = base.text_config
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    different = [f"{key} {size}" for key, size in sizes.items() if size != text_config[key]]
    if config.aux_layers[-1] > text_config["num_hidden_layers"]:
        different.append(f"base layer {config.aux_layers[-1]}")
    if different:
        raise UserError(
            f"a draft of its base's sizes in {folder / CONFIG}",
            ", ".join(different),
            "restore that file",
        )


def _mapping_problem(
    config: DSparkConfig, d2t: torch.Tensor | None, t2d: torch.Tensor | None
) -> str:
    """What is wrong with the mapping between the vocabularies; empty if nothing is."""
    if d2t is None:
        return "no d2t for a smaller vocabulary" if config.has_draft_vocabulary else ""
    if d2t.dtype != torch.int64 or d2t.shape != (config.draft_vocab_size,):
        return f"d2t of {d2t.dtype} {list(d2t.shape)}"
    vocabulary = DraftVocabulary.from_offsets(d2t, config.vocab_size)
    kept = vocabulary.kept
    if not (kept.diff() > 0).all() or kept[0] < 0 or kept[-1] >= config.vocab_size:
        return f"d2t that does not rise within {config.vocab_size} tokens"
    if t2d is not None and not torch.equal(t2d, vocabulary.t2d):
        return "t2d of other tokens than d2t's"
    return ""
