"""`mtp graft` beside speculators' `stitch-mtp` on the same tiny bases: which layouts each handles.

    pip install --target /tmp/speculators speculators==0.9.0
    PYTHONPATH=/tmp/speculators python benchmarks/graft/stitching.py \
      --work /tmp/stitching --report stitching.json

speculators caps transformers and datasets, so it is no dependency of ours; without it only our
side runs. Every base of `tests/tiny.py` and of `tests/tiny_quantized.py` is built twice over, and
both tools get the same BF16 head: once with the layers that the base has, once with four. Theirs
gets it in its own format, under its own names (`MTP_EXACT_REMAP`, `MTP_PREFIX_REMAP`). Layers after
the first have no name there; they get vLLM's, which its mapping lets through: the kindest reading.

`judge.py` then asks both outputs the same questions. An outcome is "right" (all checks pass),
"wrong" (a checkpoint was written that fails one) or "refused". The base must be unchanged always.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from judge import INDEX, digests, judge
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import BASES, QUANTIZED, random_head, write_base, write_tiny_head  # noqa: E402
from tiny_quantized import quantize_matrix  # noqa: E402

from graft.errors import UserError  # noqa: E402
from graft.manifest import MANIFEST_NAME  # noqa: E402
from graft.plan import plan_graft  # noqa: E402
from graft.reader import Checkpoint  # noqa: E402
from graft.writer import write_graft  # noqa: E402

ONE = {"declared": 1, "head_layers": 1}
PER_EXPERT = ONE | {"head_form": "bf16-per-expert"}
# More places for an old head, which is what stitching is about.
MORE: dict[str, dict[str, Any]] = {
    "old head per expert, its own shard": PER_EXPERT,
    "old head per expert, among trunk tensors": PER_EXPERT | {"head_place": "mixed"},
    "old head per expert, single file": PER_EXPERT | {"head_place": "mixed", "num_shards": 1},
    "old head fused, flat config": ONE | {"nested": False, "prefix": "model."},
    "dense, old head": ONE | {"dense": True},
    "dense, old head, single file": ONE | {"dense": True, "head_place": "mixed", "num_shards": 1},
}
Build = Callable[[Path], Path]


def builders() -> dict[str, Build]:
    """Name of a base -> what writes it to a folder."""
    rows: dict[str, Build] = {}
    for name, keywords in (BASES | MORE).items():
        rows[name] = lambda folder, keywords=keywords: write_base(folder, **keywords)
    for name in QUANTIZED:
        rows[f"{name}; no head"] = lambda folder, name=name: write_base(folder, quantized=name)
        rows[f"{name}; BF16 head"] = lambda folder, name=name: _grafted(
            folder, name, "bf16-per-expert"
        )
        if name == "FP8 block":
            rows["FP8 block; FP8 head"] = _fp8_head
            continue
        rows[f"{name}; NVFP4 head"] = lambda folder, name=name: _grafted(
            folder, name, "nvfp4-modelopt"
        )
        rows[f"{name}; NVFP4 head, single file"] = lambda folder, name=name: _one_file(
            _grafted(folder, name, "nvfp4-modelopt")
        )
    return rows


def _grafted(folder: Path, name: str, form: Any) -> Path:
    """A quantized base that has a one-layer head, with configs that fit."""
    plain = write_base(folder.with_name("plain"), quantized=name)
    head = write_tiny_head(folder.with_name("old"), plain, num_layers=1, form=form, seed=5)
    write_graft(plan_graft(plain, head), folder, link="copy")
    (folder / MANIFEST_NAME).unlink()
    shutil.rmtree(plain)
    shutil.rmtree(head)
    return folder


def _one_file(folder: Path) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / INDEX).unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _fp8_head(folder: Path) -> Path:
    """As Qwen ships Qwen3.6-35B-A3B-FP8: the head's matrices in FP8 blocks, in a shard."""
    write_base(folder, quantized="FP8 block", declared=1)
    config = json.loads((folder / "config.json").read_text())
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in random_head(config["text_config"], 1, "bf16-per-expert", seed=5).items():
        if "_proj" in name:
            stored |= quantize_matrix(name.removesuffix(".weight"), tensor, "fp8-block")
        else:
            stored[name] = tensor
    save_file(stored, folder / "mtp.safetensors", metadata={"format": "pt"})
    gates = ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
    config["quantization_config"]["modules_to_not_convert"] += gates
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(stored, "mtp.safetensors")
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in stored.values())
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def ours(base: Path, head: dict[str, torch.Tensor], num_layers: int, work: Path) -> None:
    """Graft `head` onto `base` into `work / "out"`."""
    folder = write_tiny_head(work / "head", base, num_layers=num_layers, tensors=head)
    write_graft(plan_graft(base, folder), work / "out", link="copy")


def theirs(base: Path, head: dict[str, torch.Tensor], num_layers: int, work: Path) -> None:
    """The same by speculators, from a checkpoint of its own format."""
    from speculators.cli import stitch
    from speculators.convert.mtp import MTPConverter

    stitch.console.quiet = True
    (work / "head").mkdir()
    named = {MTPConverter._remap_key(name): tensor for name, tensor in head.items()}
    save_file(named, work / "head" / "model.safetensors")
    stitch.stitch(work / "head", base, work / "out")


def outcome(tool: Callable[..., None], build: Build, num_layers: int, work: Path) -> dict[str, Any]:
    """Build a base, run a tool on it, judge what it left. Everything is in `work`, then gone."""
    work.mkdir(parents=True)
    try:
        torch.manual_seed(0)  # for the packed bytes of quantized trunks
        base = build(work / "base")
        head = random_head(Checkpoint(base).text_config, num_layers, "bf16-fused", seed=9)
        before = digests(base)
        row: dict[str, Any] = {"outcome": "right"}
        try:
            tool(base, head, num_layers, work)
        except UserError as error:
            row = {"outcome": "refused", "how": "one line", "says": str(error)}
        except Exception as error:
            how = type(error).__name__
            row = {"outcome": "refused", "how": how, "says": str(error)}
        row["base_unchanged"] = digests(base) == before
        if row["outcome"] == "refused":
            left = digests(work / "out")  # nothing at all for a folder that is not there
            row["left_behind"] = (
                "nothing"
                if not left
                else ("a copy of the base" if left == before else "a half-stitched checkpoint")
            )
        if row["outcome"] == "right":
            failed = {name: p for name, p in judge(work / "out", base, head).items() if p}
            row["failed"] = {name: {"number": len(p), "first": p[0]} for name, p in failed.items()}
            if failed or not row["base_unchanged"]:
                row["outcome"] = "wrong"
        return json.loads(json.dumps(row).replace(str(work), ""))
    finally:
        shutil.rmtree(work)


def run(work: Path, tools: dict[str, Callable[..., None]]) -> Iterator[dict[str, Any]]:
    for name, build in builders().items():
        probe = build(work / "probe" / "base")
        there = {n.split(".")[2] for n in Checkpoint(probe).head_names if ".layers." in n}
        shutil.rmtree(work / "probe")
        for num_layers in sorted({len(there) or 1, 4}):
            row = {"base": name, "layers_there": len(there), "layers_given": num_layers}
            for tool, action in tools.items():
                row[tool] = outcome(action, build, num_layers, work / "case")
            print(name, num_layers, {tool: row[tool]["outcome"] for tool in tools}, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="an empty folder")
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    tools: dict[str, Callable[..., None]] = {"mtp graft": ours}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        versions |= {name: version(name) for name in ("speculators", "transformers")}
        tools["speculators"] = theirs
    except PackageNotFoundError:
        print("speculators is not installed: our side only")
    rows = list(run(arguments.work, tools))
    report = {"schema_version": 1, "versions": versions, "rows": rows}
    arguments.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
