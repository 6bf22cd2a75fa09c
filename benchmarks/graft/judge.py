"""Is this folder the base with this head in it? Asked of any tool's output, from its bytes.

Written apart from `graft` (safetensors alone opens the files), so that it can also judge `graft`;
only the rules for quantization configs are `graft.schemes`'s, which `tests/vllm` pins to vLLM.
Answers are lists of problems, so that a result says why it is wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from graft.errors import UserError
from graft.reader import Checkpoint
from graft.schemes import precision_problems

INDEX = "model.safetensors.index.json"
Tensors = dict[str, list[torch.Tensor]]


def judge(out: Path, base: Path, head: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Every check of `out`, with what it found wrong: nothing means that it is right.

    Args:
        out: what a tool wrote.
        base: the checkpoint that it was given, unchanged.
        head: the head that it was given: BF16, vLLM's names, experts fused or not.
    """
    try:
        found, wanted = read_as_vllm(out), read_as_vllm(base)
    except Exception as error:  # whatever safetensors or json say
        return {"files open": [f"{type(error).__name__}: {error}"]}
    return {
        "files open": [],
        "index is true": list(_index(out)),
        "total_size is right": list(_total_size(out, found)),
        "each weight once": list(_twice(found)),
        "head is whole, for the stated layers": list(_complete(out, found, head)),
        "head is the one given": list(_values(found, head)),
        "trunk bytes unchanged": list(_trunk(found, wanted)),
        "quantization config fits": list(_precision(out)),
    }


def read_as_vllm(folder: Path) -> Tensors:
    """All tensors that vLLM reads: of each file that the index names, or of every file without."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        names = sorted(set(_index_of(folder)["weight_map"].values()))
    found: Tensors = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                found.setdefault(key, []).append(file.get_tensor(key))
    return found


def one_by_one(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The head's tensors with each expert's matrices under their own names."""
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if not name.startswith("mtp.") or not stem.endswith(".experts"):
            yield name, tensor
            continue
        for number, matrix in enumerate(tensor):
            half = len(matrix) // 2
            parts = {"down_proj": matrix}
            if last == "gate_up_proj":
                parts = {"gate_proj": matrix[:half], "up_proj": matrix[half:]}
            for part, value in parts.items():
                yield f"{stem}.{number}.{part}.weight", value


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


def _index(out: Path) -> Iterator[str]:
    files = {path.name for path in out.glob("*.safetensors")}
    if not (out / INDEX).exists():
        return
    weight_map = _index_of(out)["weight_map"]
    yield from (f"{name} is not in the index" for name in sorted(files - set(weight_map.values())))
    stored = set()
    for name in sorted(files & set(weight_map.values())):
        with safe_open(out / name, framework="pt") as file:
            stored |= {(key, name) for key in file.keys()}  # noqa: SIM118
    for key, name in sorted(stored ^ set(weight_map.items())):
        yield f"{key} of {name}: {'not listed' if (key, name) in stored else 'not there'}"


def _total_size(out: Path, found: Tensors) -> Iterator[str]:
    if not (out / INDEX).exists():
        return
    size = sum(t.nbytes for copies in found.values() for t in copies)
    stated = _index_of(out).get("metadata", {}).get("total_size")
    if stated != size:
        yield f"total_size is {stated}, the tensors have {size} bytes"


def _twice(found: Tensors) -> Iterator[str]:
    copies = [(name, tensor) for name, several in found.items() for tensor in several]
    counts: Counter[str] = Counter()
    for name, tensor in copies:
        counts.update(key for key, _ in one_by_one({name: tensor}))
    yield from (f"{name} is stored {n} times" for name, n in sorted(counts.items()) if n > 1)


def _complete(out: Path, found: Tensors, head: Mapping[str, torch.Tensor]) -> Iterator[str]:
    config = json.loads((out / "config.json").read_text())
    text = config.get("text_config", config)
    is_next = config["model_type"] == "qwen3_next"
    key = "num_nextn_predict_layers" if is_next else "mtp_num_hidden_layers"
    stated = config.get(key, text.get(key, 1 if is_next else None))
    given = 1 + max(int(name.split(".")[2]) for name in head if name.startswith("mtp.layers."))
    if stated != given:
        yield f"{key} is {stated}, the head has {given} layers"
    wanted = {name for name, _ in one_by_one(head)}
    mine = {name: several[0] for name, several in found.items() if name.startswith("mtp")}
    stored = {name for name, _ in one_by_one(mine)}
    yield from (f"{name} is missing" for name in sorted(wanted - stored))
    yield from (f"{name} is no part of the head" for name in sorted(stored - wanted))


def _values(found: Tensors, head: Mapping[str, torch.Tensor]) -> Iterator[str]:
    wanted = dict(one_by_one(head))
    for name, several in found.items():
        for tensor in several:
            for key, value in one_by_one({name: tensor}):
                if key in wanted and not _same(value, wanted[key]):
                    yield f"{key} ({name}, {str(value.dtype).removeprefix('torch.')}) differs"


def _trunk(found: Tensors, base: Tensors) -> Iterator[str]:
    trunks = [{n: t for n, t in all_.items() if not n.startswith("mtp")} for all_ in (found, base)]
    ours, theirs = trunks
    yield from (f"{name} in one only" for name in sorted(ours.keys() ^ theirs.keys()))
    for name in sorted(ours.keys() & theirs.keys()):
        if not _same(ours[name][0], theirs[name][0]):
            yield f"{name} differs"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def _precision(out: Path) -> list[str]:
    try:
        found = precision_problems(Checkpoint(out))
    except UserError as error:
        return [str(error)]
    return [found] if isinstance(found, str) else found
