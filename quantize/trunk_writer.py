"""A base written anew with its routed experts in NVFP4, everything else as it is.

Shard by shard: one without experts is linked, one with experts is written anew, under its own name,
with the other tensors as the byte ranges that they are. So memory holds one matrix at a time,
whatever the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from graft.config_patch import nvfp4_blocks
from graft.convert import PlannedTensor
from graft.errors import UserError
from graft.ignore import derive_ignore
from graft.index import INDEX_NAME, TensorInfo, index_of, write_json
from graft.modules import is_multimodal, linear_modules
from graft.place import Link, copy_file, require_space, share_files
from graft.plan import QUANT_FILE, other_files
from graft.reader import Checkpoint, TensorStore
from graft.schemes import SCHEMES, precision_problems, read_statement
from graft.writer import write_shard
from mtp.progress import track
from quantize.streamed import ExpertMatrix, expert_matrices

REPORT = "quantize.manifest.json"  # what the command says about itself; also marks its own folders


def open_plain_base(base: Path) -> Checkpoint:
    """Open a base that can be quantized.

    Raises:
        UserError: an unsupported base, a quantized one, or one without routed experts.
    """
    checkpoint = Checkpoint(base)
    checkpoint.require_supported()
    modules = linear_modules(checkpoint.infos(), is_multimodal(checkpoint.config))
    stored = sorted({module.stored for module in modules if module.quantized})
    stated = read_statement(checkpoint).name
    if stated != "none" or stored:
        raise UserError(
            "an unquantized base",
            f"{stated}, stored as {', '.join(stored) or 'plain tensors'}, in {base}",
            "use the BF16 base it was made from",
        )
    if not any(module.is_experts and not module.is_head for module in modules):
        raise UserError("a base with routed experts", "a dense base", "serve it as it is")
    return checkpoint


def write_trunk(
    checkpoint: Checkpoint,
    folder: Path,
    algo: str,
    input_amax: Mapping[str, float],
    producer: Mapping[str, str],
    link: Link = "auto",
) -> dict[str, int]:
    """Write a base with packed experts into `folder`, which is empty.

    Args:
        checkpoint: from `open_plain_base`.
        folder: gets shards, index, both configs, and the base's other files.
        algo: what the configs state: "NVFP4", or "W4A16_NVFP4" without input scales.
        input_amax: the largest input by `PREFIX.experts.gate_up_proj` and `….down_proj`; empty for
            W4A16.
        producer: who quantized, for the configs.
        link: how shards without experts are placed.

    Returns:
        num_matrices, bytes_before, bytes_after.

    Raises:
        UserError: an incomplete expert, or too little space.
    """
    matrices = expert_matrices(checkpoint.infos(), input_amax)
    written = _write_shards(checkpoint, matrices, folder, link)
    for name in other_files(checkpoint)[0]:
        if name != REPORT:
            copy_file(checkpoint.folder / name, folder / name)
    write_json(folder / INDEX_NAME, index_of(written.infos(), checkpoint.index_metadata))
    _write_configs(checkpoint, written, folder, algo, producer)
    if problems := precision_problems(Checkpoint(folder)):
        raise AssertionError(f"the written configs contradict the tensors: {problems}")
    return {
        "num_matrices": sum(map(len, matrices.values())),
        "bytes_before": sum(info.nbytes for info in checkpoint.infos()),
        "bytes_after": sum(info.nbytes for info in written.infos()),
    }


def _write_shards(
    checkpoint: Checkpoint, matrices: dict[str, list[ExpertMatrix]], staging: Path, link: Link
) -> TensorStore:
    """Place every shard in `staging`, experts packed; all of it, reopened."""
    planned: dict[str, list[PlannedTensor]] = {}
    for name, header in checkpoint.shards.items():
        if any(tensor in matrices for tensor in header):
            planned[name] = [part for info in header.values() for part in _parts(info, matrices)]
    kept = [name for name in checkpoint.shards if name not in planned]
    pairs = [(checkpoint.folder / name, staging / name) for name in kept]
    shared = share_files(pairs, link)
    left = [pair for pair in pairs if pair[1].name not in shared]
    nbytes = sum(part.nbytes for parts in planned.values() for part in parts)
    require_space(staging, nbytes + sum(old.stat().st_size for old, _ in left))
    for old, new in left:
        copy_file(old, new)
    for name, parts in track(list(planned.items()), "packing", unit="shard"):
        write_shard(staging / name, parts)
    return TensorStore(staging / name for name in checkpoint.shards)


def _parts(info: TensorInfo, matrices: dict[str, list[ExpertMatrix]]) -> list[PlannedTensor]:
    if info.name not in matrices:
        return [info]
    return [part for matrix in matrices[info.name] for part in matrix.parts()]


def _write_configs(
    checkpoint: Checkpoint,
    written: TensorStore,
    folder: Path,
    algo: str,
    producer: Mapping[str, str],
) -> None:
    multimodal = is_multimodal(checkpoint.config)
    rules = SCHEMES["none"].rules(read_statement(checkpoint), multimodal)
    ignore = derive_ignore(linear_modules(written.infos(), multimodal), rules)
    block, file = nvfp4_blocks(algo, ignore, producer)
    write_json(folder / "config.json", {**checkpoint.config, "quantization_config": block})
    write_json(folder / QUANT_FILE, file or {})
