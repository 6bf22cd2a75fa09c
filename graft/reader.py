"""Lazy tensors of a checkpoint: everything is known from headers, bytes are read on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.config_kinds import check_config
from graft.errors import UserError
from graft.index import INDEX_NAME, TensorInfo, read_header, read_index, read_json

if TYPE_CHECKING:
    import torch

SUPPORTED_MODEL_TYPES = (
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text", "qwen3_next",
)  # fmt: skip
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HEAD_PREFIX = "mtp."
MAX_NAMED = 20  # names in one message
CHUNK_BYTES = 4 * 1024 * 1024
HASH_BYTES = 256 * 1024  # small, since every core has one
TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def torch_dtype(stored: str) -> torch.dtype:
    """torch's dtype for one that safetensors spells `stored`; UserError if torch has none."""
    import torch  # here, since a graft must not pay for it (graft/values.py)

    if stored not in TORCH_NAMES:
        raise UserError("a dtype that torch can hold", stored, "convert the tensor")
    return getattr(torch, TORCH_NAMES[stored])


class TensorStore:
    """Tensors by name over some shards. Nothing stays open, nothing is kept in memory."""

    def __init__(self, shards: Iterable[Path]) -> None:
        """Read the headers of `shards`.

        Raises:
            UserError: for a broken shard, or a tensor that two shards hold.
        """
        self.shards: dict[str, dict[str, TensorInfo]] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for path in shards:
            header = read_header(path)
            for name, info in header.items():
                if name in self._tensors:
                    raise UserError(
                        f"each tensor of {path.parent} once",
                        f"{name} in both {self._tensors[name].shard.name} and {path.name}",
                        "remove the stale file",
                    )
                self._tensors[name] = info
            self.shards[path.name] = header

    @property
    def names(self) -> list[str]:
        """All tensor names, from the shard headers."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """What the header says about one tensor; UserError if no shard holds it."""
        if name not in self._tensors:
            raise UserError(f"tensor {name}", "no shard that holds it", "check the checkpoint")
        return self._tensors[name]

    def infos(self) -> list[TensorInfo]:
        """What the headers say about every tensor."""
        return list(self._tensors.values())

    def load(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own, in its stored dtype and shape."""
        import torch

        info = self.info(name)
        dtype = torch_dtype(info.dtype)
        if not info.nbytes:
            return torch.empty(info.shape, dtype=dtype)
        buffer = bytearray(info.nbytes)
        view, filled = memoryview(buffer), 0
        for chunk in self.chunks(name):
            view[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return torch.frombuffer(buffer, dtype=dtype).reshape(info.shape)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield one tensor's bytes in pieces of at most 4 MiB (whole elements)."""
        info = self.info(name)
        with info.shard.open("rb") as file:
            file.seek(info.offset)
            left = info.nbytes
            while left:
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise _shrunk(info)
                left -= len(chunk)
                yield chunk

    def digest(self, name: str) -> str:
        """SHA-256 of one tensor's bytes, as hex."""
        info = self.info(name)
        digest, left = hashlib.sha256(), info.nbytes
        view = memoryview(bytearray(min(left, HASH_BYTES)))
        with info.shard.open("rb", buffering=0) as file:
            file.seek(info.offset)
            while left:
                count = file.readinto(view[: min(left, len(view))])
                if not count:
                    raise _shrunk(info)
                digest.update(view[:count])
                left -= count
        return digest.hexdigest()


class Checkpoint(TensorStore):
    """A model folder: `config.json` and safetensors shards, checked against each other."""

    def __init__(self, folder: Path) -> None:
        """Open and check `folder`.

        Raises:
            UserError: naming the file, for anything missing, broken or contradictory.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(
                f"a checkpoint folder at {folder}",
                "a file" if self.folder.exists() else "nothing",
                "give the path of a downloaded checkpoint",
            )
        self.config = read_json(self.folder / "config.json")
        check_config(self.config, self.folder / "config.json")
        check_config(self.text_config, self.folder / "config.json")
        present = sorted(path.name for path in self.folder.glob("*.safetensors"))
        index = self.folder / INDEX_NAME
        self.weight_map: dict[str, str] | None = None
        self.index_metadata: dict[str, Any] = {}
        if index.exists() or index.is_symlink():
            self.weight_map, self.index_metadata = read_index(index)
        if self.weight_map is None:
            shards = present
            if not shards:
                raise _no_weights(self.folder)
            self.unindexed: tuple[str, ...] = ()
        else:
            shards = sorted(set(self.weight_map.values()))
            self._check_present(shards)
            self.unindexed = tuple(name for name in present if name not in shards)
        super().__init__(self.folder / name for name in shards)
        self._check_index()
        self.standalone_head = self._add_standalone_head()

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's config: `text_config` where nested, else the whole."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def head_names(self) -> list[str]:
        """Names of the tensors of the MTP head."""
        return [name for name in self.names if name.startswith(HEAD_PREFIX)]

    def require_supported(self) -> None:
        """Refuse a checkpoint that is not Qwen3.5-like, or whose names follow another engine."""
        model_type = self.config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UserError(
                f"a Qwen3.5-like base (model_type {', '.join(SUPPORTED_MODEL_TYPES)})",
                f"model_type {model_type!r} in {self.folder / 'config.json'}",
                "choose another --base",
            )
        for name in self.names:
            if name.startswith(("language_model.", "model.mtp.", "model.language_model.mtp.")):
                raise UserError(
                    "tensor names as transformers writes them (model.…, mtp.…)",
                    f"{name} in {self.folder}, the MLX layout or another engine's",
                    "use the Hugging Face checkpoint it was converted from",
                )

    def _check_present(self, shards: list[str]) -> None:
        missing = [name for name in shards if not (self.folder / name).is_file()]
        if missing:
            named = [
                f"{name} (a broken link)" if (self.folder / name).is_symlink() else name
                for name in missing[:MAX_NAMED]
            ]
            raise UserError(
                f"the {len(shards)} shards that {self.folder / INDEX_NAME} names",
                f"{len(missing)} missing: {', '.join(named)}",
                "download the missing files",
            )

    def _check_index(self) -> None:
        lacking = [
            f"{name} ({shard})"
            for name, shard in (self.weight_map or {}).items()
            if name not in self.shards[shard]
        ]
        if lacking:
            raise UserError(
                f"every tensor of {self.folder / INDEX_NAME} in the shard it names",
                f"{len(lacking)} absent: {', '.join(sorted(lacking)[:MAX_NAMED])}",
                "download the index and the shards again",
            )

    def _add_standalone_head(self) -> tuple[str, ...]:
        """Read heads that sit in a file beside the indexed shards, as some exports leave them."""
        found = []
        for file in self.unindexed:
            try:
                header = read_header(self.folder / file)
            except UserError:
                continue  # not named by the index: nobody loads it, so its state is no error
            mine = header and all(name.startswith(HEAD_PREFIX) for name in header)
            if mine and not any(name in self._tensors for name in header):
                self.shards[file] = header
                self._tensors.update(header)
                found.append(file)
        return tuple(found)


def _shrunk(info: TensorInfo) -> UserError:
    return UserError(
        f"{info.nbytes} bytes of {info.name} in {info.shard}",
        "a file that became shorter while it was read",
        "leave the checkpoint alone and run again",
    )


def _no_weights(folder: Path) -> UserError:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return UserError(
            f"safetensors files in {folder}",
            f"only pickle files, which are never read: {', '.join(pickles)}",
            "convert the weights to safetensors",
        )
    return UserError(f"safetensors files in {folder}", "none", "download the weights")
