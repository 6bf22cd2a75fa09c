"""Drop the vision tower, as transformers' own text-only export does.

`AutoModelForCausalLM.from_pretrained(vl).save_pretrained(text)` (transformers 5.24.0) writes the
text config flat, with the text class and the outer dtype and quantization, and keeps the prefix
`model.language_model.`; vLLM's text class maps that prefix too (0.32.0, `Qwen3_5ForCausalLMBase`).
So no trunk tensor changes its name, and shards without vision tensors stay the base's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.errors import UserError
from graft.layout import base_tensor_names
from graft.modules import is_multimodal
from graft.reader import HEAD_PREFIX, Checkpoint

VISION_PREFIXES = ("model.visual.", "visual.")
PREPROCESSOR_FILES = (
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip
# Of the outer config; all else there describes the vision tower or its tokens.
CARRIED = ("dtype", "torch_dtype", "quantization_config", "transformers_version")
LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True, kw_only=True)
class TextOnly:
    """What leaving the vision tower out means: tensors, files, and the bytes of both."""

    dropped: tuple[str, ...]
    left_out_files: tuple[str, ...]
    saved_bytes: int
    config: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For the manifest and `--json`."""
        return {
            "dropped": list(self.dropped),
            "left_out": list(self.left_out_files),
            "saved_bytes": self.saved_bytes,
        }


def plan_text_only(checkpoint: Checkpoint) -> TextOnly:
    """Plan the text-only form of a base; a base that is text-only already loses nothing.

    Raises:
        UserError: vision tensors in a base that is not declared multimodal, or a nested config
            whose text part does not say which model it is; or tensors that are neither.
    """
    names = tuple(name for name in checkpoint.names if name.startswith(VISION_PREFIXES))
    if not is_multimodal(checkpoint.config):
        if names:
            raise UserError(
                f"no vision tensors, since {checkpoint.folder / 'config.json'} is text-only",
                f"{len(names)}, such as {names[0]}",
                "restore config.json",
            )
        return TextOnly(dropped=(), left_out_files=(), saved_bytes=0, config=checkpoint.config)
    trunk = base_tensor_names(checkpoint).layer_prefix.removesuffix("layers.")
    text = tuple(f"{trunk}{part}." for part in ("embed_tokens", "layers", "norm"))
    known = (*VISION_PREFIXES, *text, "lm_head.", HEAD_PREFIX)
    if strange := [name for name in checkpoint.names if not name.startswith(known)]:
        raise UserError(
            f"text tensors ({', '.join(text)}) and a vision tower ({', '.join(VISION_PREFIXES)})",
            f"{len(strange)} of neither in {checkpoint.folder}, such as {strange[0]}",
            "graft without --text-only",
        )
    files = tuple(f for f in PREPROCESSOR_FILES if (checkpoint.folder / f).is_file())
    saved = sum(checkpoint.info(name).nbytes for name in names)
    return TextOnly(
        dropped=names,
        left_out_files=files,
        saved_bytes=saved + sum((checkpoint.folder / f).stat().st_size for f in files),
        config=text_only_config(checkpoint.config, checkpoint.folder),
    )


def text_only_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """config.json of the text-only export: the text config, flat."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not str(kind).endswith("_text"):
        raise UserError(
            f"a text_config with a model_type in {folder / 'config.json'}",
            repr(kind),
            "restore config.json",
        )
    flat = {
        "architectures": [
            name.replace("ForConditionalGeneration", "ForCausalLM")
            for name in config["architectures"]
        ],
        **copy.deepcopy(text),
    }
    if "tie_word_embeddings" in config:
        flat.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    for key in CARRIED:
        if config.get(key) is not None:
            flat[key] = copy.deepcopy(config[key])
    return flat


def without_vision(block: Mapping[str, Any]) -> dict[str, Any]:
    """A quantization block without what it says of the vision tower.

    Only literal names go. None of them can name a text module, so what is excluded stays excluded.
    """
    spelled = ("model.visual", "visual")
    cleaned: dict[str, Any] = {}
    for key, value in block.items():
        if key in LISTS and isinstance(value, list):
            cleaned[key] = [entry for entry in value if not str(entry).startswith(spelled)]
        elif key == "quantized_layers" and isinstance(value, dict):
            cleaned[key] = {n: v for n, v in value.items() if not n.startswith(spelled)}
        else:
            cleaned[key] = without_vision(value) if isinstance(value, dict) else value
    return cleaned
