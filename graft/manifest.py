"""Fingerprints that pair a head with its base, digests, and the head folder's format.

A head is only right for the base whose hidden states and output matrix it was trained on. The
fingerprint remembers what identifies that base: sizes, tokenizer, quantization, and the bytes of
the tensors that both share.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.errors import UserError
from graft.formats import FORMS, Form, describe_quantization
from graft.index import is_file_name, read_json, write_json
from graft.layout import MAX_HEAD_LAYERS, base_tensor_names, is_tied
from graft.reader import HEAD_PREFIX, Checkpoint, TensorStore
from graft.tensor_file import save_tensors

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
MANIFEST_SCHEMA = 2  # 2: base_files, text_only, what became of shards
HEAD_METADATA, HEAD_WEIGHTS = "head.json", "mtp.safetensors"
MANIFEST_NAME = "graft.manifest.json"
CONFIG_FACTS = (
    "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "rms_norm_eps", "attn_output_gate",
)  # fmt: skip
ROPE_FACTS = ("rope_theta", "partial_rotary_factor", "rope_type", "mrope_section")
HEAD_FIELDS: dict[str, tuple[type, ...]] = {
    "schema_version": (int,), "kind": (str,), "num_layers": (int,), "form": (str,),
    "text_config": (dict,), "base_fingerprint": (dict,), "quantization": (dict, type(None)),
    "provenance": (dict,), "acceptance": (dict, type(None)),
}  # fmt: skip


def base_fingerprint(checkpoint: Checkpoint) -> dict[str, Any]:
    """What identifies a base for a head: config facts, tokenizer, quantization, shared tensors."""
    config, names = checkpoint.text_config, base_tensor_names(checkpoint)
    rope = config.get("rope_parameters") or config
    tokenizer = checkpoint.folder / "tokenizer.json"
    shared = {"embed_tokens": names.embed, "lm_head": names.lm_head, "final_norm": names.final_norm}
    return {
        "schema_version": SCHEMA_VERSION,
        "config": {
            **{key: config.get(key) for key in CONFIG_FACTS},
            **{key: rope.get(key) for key in ROPE_FACTS},
            "tie_word_embeddings": is_tied(checkpoint),
        },
        "quantization": describe_quantization(checkpoint),
        "tokenizer_sha256": file_digest(tokenizer) if tokenizer.exists() else None,
        "tensor_sha256": {
            key: checkpoint.digest(name) if name else None for key, name in shared.items()
        },
    }


def fingerprint_differences(
    head_was_trained_on: Mapping[str, Any], base: Mapping[str, Any]
) -> list[str]:
    """Say in words where two fingerprints differ; empty when they agree."""
    left, right = _flat(head_was_trained_on), _flat(base)
    return [
        f"{key}: head was trained on {_short(left.get(key))}, base has {_short(right.get(key))}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 else text


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of several files of a folder, on all cores (hashing releases the interpreter)."""
    names = list(names)
    largest_first = sorted(names, key=lambda name: -(folder / name).stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(file_digest, [folder / name for name in largest_first])
        digests = dict(zip(largest_first, found, strict=True))
    return {name: digests[name] for name in names}


def tensor_digests(store: TensorStore, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of several tensors' bytes, on all cores."""
    names = list(names)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(store.digest, names), strict=True))


def head_metadata(
    *,
    num_layers: int,
    form: Form,
    text_config: Mapping[str, Any],
    base_fingerprint: Mapping[str, Any],
    provenance: Mapping[str, Any],
    quantization: Mapping[str, Any] | None = None,
    acceptance: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The contents of `head.json`."""
    return {
        "schema_version": SCHEMA_VERSION, "kind": "mtp", "num_layers": num_layers, "form": form,
        "text_config": dict(text_config), "base_fingerprint": dict(base_fingerprint),
        "quantization": quantization and dict(quantization), "provenance": dict(provenance),
        "acceptance": acceptance and dict(acceptance),
    }  # fmt: skip


def write_head(
    folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]
) -> None:
    """Write a head into `folder` (which exists: stage it with `staged_folder`).

    Args:
        folder: gets `head.json` and `mtp.safetensors`.
        tensors: all named `mtp.…`.
        metadata: see `head_metadata`.

    Raises:
        ValueError: for tensors or metadata that do not make a head; the caller has a bug.
        UserError: a disk that is full, or fails.
    """
    import torch

    if problem := _metadata_problem(metadata):
        raise ValueError(problem)
    strangers = [name for name in tensors if not name.startswith(HEAD_PREFIX)]
    if strangers or not tensors:
        raise ValueError(f"a head holds tensors named mtp.…, got {strangers or 'none'}")
    # Clones, because safetensors refuses tensors that share storage (split experts do).
    own = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
           for name, tensor in tensors.items()}  # fmt: skip
    save_tensors(own, folder / HEAD_WEIGHTS)
    write_json(folder / HEAD_METADATA, metadata)


def read_head_metadata(folder: Path) -> dict[str, Any]:
    """Read and check `head.json`.

    Raises:
        UserError: if `folder` is not a head, or a head of another schema.
    """
    if not (Path(folder) / HEAD_METADATA).is_file():
        raise UserError(
            f"a head folder at {folder} (with {HEAD_METADATA})",
            "none" if Path(folder).is_dir() else "no such folder",
            "give the folder that mtp train or mtp quantize wrote",
        )
    metadata = read_json(Path(folder) / HEAD_METADATA)
    if problem := _metadata_problem(metadata):
        raise UserError(
            f"a head that this version can read in {Path(folder) / HEAD_METADATA}",
            problem,
            "write the head again with this version",
        )
    return metadata


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read `graft.manifest.json`; UserError if it is broken or of another schema."""
    path = Path(folder) / MANIFEST_NAME
    manifest = read_json(path)
    files, head = manifest.get("files"), manifest.get("head")
    if (
        manifest.get("schema_version") != MANIFEST_SCHEMA
        or not isinstance(files, dict)
        or not all(map(is_file_name, files))
        or not manifest.get("base_fingerprint")
        or not isinstance(head, dict)
        or not isinstance(head.get("tensor_sha256"), dict)
    ):
        raise UserError(
            f"a whole manifest of schema {MANIFEST_SCHEMA} in {path}",
            f"one of schema {manifest.get('schema_version')!r}, or not all of it",
            "graft again with this version",
        )
    return manifest


def _metadata_problem(metadata: Mapping[str, Any]) -> str | None:
    for key, kinds in HEAD_FIELDS.items():
        if key not in metadata:
            return f"no {key}"
        if not isinstance(metadata[key], kinds):
            return f"{key} of type {type(metadata[key]).__name__}"
    if metadata["schema_version"] != SCHEMA_VERSION:
        return f"schema_version {metadata['schema_version']}"
    if metadata["kind"] != "mtp" or metadata["form"] not in FORMS:
        return f"kind {metadata['kind']!r} in form {metadata['form']!r}"
    producer = (metadata["quantization"] or {}).get("producer", {})
    if not isinstance(producer, dict):
        return f"a quantization producer of type {type(producer).__name__}"
    num_layers = metadata["num_layers"]  # a list of its tensors must fit the memory
    sound = type(num_layers) is int and 0 < num_layers <= MAX_HEAD_LAYERS
    return None if sound else f"num_layers {num_layers}"


class HeadFolder(TensorStore):
    """A trained or quantized head on disk: `metadata` and lazy tensors."""

    def __init__(self, folder: Path) -> None:
        """Open and check a head folder; UserError names the file that is wrong."""
        self.folder = Path(folder)
        self.metadata = read_head_metadata(self.folder)
        super().__init__([self.folder / HEAD_WEIGHTS])

    @property
    def form(self) -> Form:
        """How the head's tensors are stored."""
        return self.metadata["form"]

    @property
    def num_layers(self) -> int:
        """Number of MTP layers."""
        return self.metadata["num_layers"]

    def load_all(self) -> dict[str, torch.Tensor]:
        """Every tensor of the head, in memory."""
        return {name: self.load(name) for name in self.names}
