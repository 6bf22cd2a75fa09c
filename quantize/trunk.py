"""`mtp quantize --trunk`: the routed experts of a BF16 base to NVFP4, all else as it is.

Experts are nine tenths of such a base, and the head that is served beside them has to be stated in
the same quantization. Shard by shard: one without experts is linked, one with experts is written
anew, under its own name, with the other tensors as the byte ranges that they are. So memory holds
one matrix at a time, whatever the base. W4A16 needs no data; W4A4 needs the base once in process,
to see the experts' inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from graft.config_patch import nvfp4_blocks
from graft.convert import PlannedTensor
from graft.errors import UserError
from graft.ignore import derive_ignore
from graft.index import INDEX_NAME, TensorInfo, index_of, write_json
from graft.modules import is_multimodal, linear_modules
from graft.place import Link, copy_file, require_space, share_files
from graft.plan import QUANT_FILE, _other_files
from graft.reader import Checkpoint, TensorStore
from graft.schemes import SCHEMES, precision_problems, read_statement
from graft.staging import staged_folder
from graft.writer import write_shard
from mtp.progress import track
from quantize.streamed import ExpertMatrix, expert_matrices

Scheme = Literal["w4a4", "w4a16"]
REPORT = "quantize.manifest.json"  # what the command says about itself; also marks its own folders
ALGOS: dict[Scheme, str] = {"w4a4": "NVFP4", "w4a16": "W4A16_NVFP4"}


def quantize_trunk(
    base: Path,
    out: Path,
    *,
    scheme: Scheme = "w4a16",
    input_amax: dict[str, float] | None = None,
    producer: dict[str, str],
    link: Link = "auto",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write `base` with its routed experts in NVFP4.

    Args:
        base: an unquantized Qwen3.5-like base with experts.
        out: the folder to make.
        scheme: "w4a16", or "w4a4" with `input_amax`.
        input_amax: for W4A4, from `calibrate_trunk`.
        producer: who quantized, for the configs.
        link: how shards without experts are placed.
        overwrite: replace an `out` that this command wrote.

    Returns:
        The report that also lies in the folder: matrices, bytes before and after.

    Raises:
        UserError: a base that is quantized already or has no experts, or an `out` that must not be
            written.
    """
    checkpoint = open_plain_base(base)
    matrices = expert_matrices(checkpoint.infos(), input_amax or {})
    with staged_folder(out, overwrite=overwrite, sources=[base], mark=REPORT) as staging:
        written = _write_shards(checkpoint, matrices, staging, link)
        for name in _other_files(checkpoint, ())[0]:
            if name != REPORT:
                copy_file(base / name, staging / name)
        write_json(staging / INDEX_NAME, index_of(written.infos(), checkpoint.index_metadata))
        _write_configs(checkpoint, written, staging, scheme, producer)
        if problems := precision_problems(Checkpoint(staging)):
            raise AssertionError(f"the written configs contradict the tensors: {problems}")
        report = {
            "schema_version": 1,
            "base": str(base),
            "scheme": scheme,
            "producer": producer,
            "num_matrices": sum(map(len, matrices.values())),
            "bytes_before": sum(info.nbytes for info in checkpoint.infos()),
            "bytes_after": sum(info.nbytes for info in written.infos()),
        }
        write_json(staging / REPORT, report)
    return report


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
    staging: Path,
    scheme: Scheme,
    producer: dict[str, str],
) -> None:
    multimodal = is_multimodal(checkpoint.config)
    rules = SCHEMES["none"].rules(read_statement(checkpoint), multimodal)
    ignore = derive_ignore(linear_modules(written.infos(), multimodal), rules)
    block, file = nvfp4_blocks(ALGOS[scheme], ignore, producer)
    write_json(staging / "config.json", {**checkpoint.config, "quantization_config": block})
    write_json(staging / QUANT_FILE, file or {})
