"""What a graft says about itself: the contents of `graft.manifest.json`.

The manifest is what `mtp verify` compares with and what `mtp ungraft` works from. So it holds the
base's own small files as bytes, not as parsed JSON: a base that comes back must be the same file.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft.errors import UserError
from graft.index import MAX_JSON_BYTES
from graft.manifest import MANIFEST_NAME, MANIFEST_SCHEMA, file_digests, tensor_digests
from graft.plan import GraftPlan
from graft.reader import HEAD_PREFIX, TensorStore


def graft_manifest(
    plan: GraftPlan,
    folder: Path,
    tensors: TensorStore,
    storage: Mapping[str, str],
    tool: str | None,
) -> dict[str, Any]:
    """Describe the grafted checkpoint in `folder`, hashing every file in it.

    Args:
        plan: what was carried out.
        folder: holds all files but the manifest.
        tensors: the tensors of `folder`.
        storage: how files were placed (`hard-link`, `copy`); those not named were `written`.
        tool: name and version of the tool.
    """
    names = sorted(path.name for path in folder.iterdir())
    digests = file_digests(folder, names)
    head = sorted(name for name in tensors.names if name.startswith(HEAD_PREFIX))
    return {
        "schema_version": MANIFEST_SCHEMA,
        "tool": tool,
        "base_fingerprint": plan.base_fingerprint,
        "allowed_mismatches": list(plan.mismatches),
        "head": {
            "num_layers": plan.num_layers,
            "form": plan.form,
            "base_fingerprint": plan.head_metadata["base_fingerprint"],
            "quantization": plan.head_metadata["quantization"],
            "provenance": plan.head_metadata["provenance"],
            "acceptance": plan.head_metadata["acceptance"],
            "tensor_sha256": tensor_digests(tensors, head),
        },
        "changes": {
            "added": list(plan.added),
            "replaced": list(plan.replaced),
            "dropped": list(plan.dropped),
            "reemitted_shards": list(plan.reemitted_shards),
            "removed_shards": list(plan.removed_shards),
            "config": list(plan.config_changes),
            "left_out": list(plan.left_out_files),
        },
        "text_only": plan.text_only and plan.text_only.as_dict(),
        "files": {
            name: {
                "sha256": digests[name],
                "bytes": (folder / name).stat().st_size,
                "storage": storage.get(name, "written"),
            }
            for name in names
        },
        "base_files": {name: packed(content) for name, content in plan.base_files.items()},
        # What this folder no longer holds, so that a base given later can be proven to be the one.
        "base_sha256": file_digests(plan.base, _lost_files(plan)),
    }


def _lost_files(plan: GraftPlan) -> list[str]:
    """Files of the base whose bytes are in no file of the graft, by what it did to them."""
    unneeded = plan.text_only.left_out_files if plan.text_only else ()
    return [*plan.reemitted_shards, *plan.removed_shards, *unneeded]


def packed(content: bytes | None) -> dict[str, str] | None:
    """A small file for the manifest, compressed; None for a file that did not exist."""
    if content is None:
        return None
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "zlib_base64": base64.b64encode(zlib.compress(content, 9)).decode("ascii"),
    }


def unpacked(value: Any, name: str) -> bytes | None:
    """The inverse of `packed`, proven by its digest; UserError if a manifest holds anything else.

    Args:
        value: what the manifest holds for one file.
        name: of the file, for the message.
    """
    if value is None:
        return None
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(base64.b64decode(value["zlib_base64"]), MAX_JSON_BYTES)
        sound = stream.eof and hashlib.sha256(content).hexdigest() == value["sha256"]
    except (KeyError, TypeError, ValueError, zlib.error):
        sound, content = False, b""
    if not sound:
        raise UserError(
            f"the base's {name} in {MANIFEST_NAME}", "something else", "restore the manifest"
        )
    return content
