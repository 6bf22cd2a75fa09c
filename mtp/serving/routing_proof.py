"""`mtp verify --vllm`: does this vLLM run the MTP layers above the first one? By measurement.

Layers 1.. are made useless in a temporary twin of the checkpoint, and both are served on the same
prompts. If the twin accepts as much as the original, those layers never ran; if it accepts nothing
after position 1, they did. Which of them runs at which position is the plugin's log line, and the
parity test in tests/vllm; this proof needs neither and trusts nothing but vLLM's counters.

The twin's layers get large finite noise. NaN would do on a CPU, but Triton's argmax may return an
index outside the vocabulary for it (vLLM says so in its rejection sampler), and caches that other
layers share would carry it into the base.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from graft.errors import UserError
from graft.layout import count_head_layers
from graft.reader import Checkpoint, torch_dtype
from mtp.serving.probe_client import run_probe

SCHEMA_VERSION = 1
Verdict = Literal["routed", "layer 0 only", "broken"]
# Not an expert: a norm is unquantized in every form of a head, and all of its layer reads it.
SCRAMBLED = re.compile(r"mtp\.layers\.[1-9]\d*\.input_layernorm\.weight")
NOISE = 100.0
MIN_ACCEPTANCE = 0.05  # below it there is nothing to compare
# A twin's acceptance relative to the original's. Without a layer it is near 0, and where the layer
# never ran it is 1, but for the ties of a GPU; anything between is neither.
DEAD, ALIVE = 0.1, 0.5


@dataclass(frozen=True, kw_only=True)
class RoutingProof:
    """Both measurements and what they prove.

    original, twin: metrics of `AcceptanceCounts.as_dict`. routed_layers: what the plugin says it
    routes, 0 for a vLLM left as it is. same_tokens: prompts to which both gave the same output.
    """

    checkpoint: Path
    vllm_version: str
    num_layers: int
    routed_layers: int
    num_prompts: int
    same_tokens: int
    original: dict[str, Any]
    twin: dict[str, Any]
    verdict: Verdict
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """The proof for `--json`."""
        return {
            "schema_version": SCHEMA_VERSION, **asdict(self), "checkpoint": str(self.checkpoint),
        }  # fmt: skip

    def as_text(self) -> str:
        """The proof for people: acceptance per position of both, and the verdict."""
        last = self.num_layers - 1
        scrambled = f"layers 1-{last} scrambled" if last > 1 else "layer 1 scrambled"
        header = "".join(f"{f'pos {k + 1}':>8}" for k in range(self.num_layers))
        lines = [
            f"routing proof: vLLM {self.vllm_version}, {self.num_layers} MTP layers, of which "
            f"the plugin says that it routes {self.routed_layers}; {self.num_prompts} prompts",
            f"  {'':24}{'drafts':>8}{header}",
        ]
        for label, run in (("as grafted", self.original), (scrambled, self.twin)):
            cells = "".join(f"{value:8.3f}" for value in run["cumulative"])
            lines.append(f"  {label:24}{run['num_drafts']:8}{cells}")
        return "\n".join([*lines, f"verdict: {self.verdict}: {self.reason}"])


def prove_routing(
    checkpoint: Path,
    prompts: list[list[int]],
    *,
    vllm_python: Path,
    num_tokens: int = 64,
    engine_options: dict[str, Any] | None = None,
) -> RoutingProof:
    """Serve a grafted checkpoint and its scrambled twin in vLLM, and compare.

    Args:
        checkpoint: a grafted checkpoint. It is only read; the twin lies beside it meanwhile.
        prompts: token ids.
        vllm_python: interpreter of the environment with vLLM. Whether it routes is its own
            affair: the plugin there, and MTP_GRAFT_ROUTING here.
        num_tokens: tokens generated for each prompt.
        engine_options: more keyword arguments of `vllm.LLM`.

    Raises:
        UserError: no head, a head of one layer, no room for the twin, or vLLM fails.
    """
    num_layers = count_head_layers(Checkpoint(checkpoint).names)
    if num_layers < 2:
        raise UserError(
            f"a head of two or more layers in {checkpoint}, so that routing makes a difference",
            f"{num_layers} MTP layers",
            "leave out --vllm: any vLLM runs it" if num_layers else "graft a head",
        )
    common = {
        "prompts": prompts, "num_speculative_tokens": num_layers, "max_tokens": num_tokens,
        "routing": None, "ignore_eos": True, "engine_options": engine_options,
    }  # fmt: skip
    with scrambled_twin(checkpoint) as twin_folder:
        runs = [
            {"name": "as grafted", "checkpoint": checkpoint, **common},
            {"name": "scrambled twin", "checkpoint": twin_folder, **common},
        ]
        measured = run_probe(vllm_python, runs)
    original, twin = measured["runs"]
    verdict, reason = judge(original, twin)
    same = sum(a == b for a, b in zip(original["outputs"], twin["outputs"], strict=True))
    return RoutingProof(
        checkpoint=checkpoint,
        vllm_version=measured["vllm_version"],
        num_layers=num_layers,
        routed_layers=original["routed_layers"],
        num_prompts=len(prompts),
        same_tokens=same,
        original=_metrics(original),
        twin=_metrics(twin),
        verdict=verdict,
        reason=reason,
    )


def _metrics(run: dict[str, Any]) -> dict[str, Any]:
    left_out = {"name", "checkpoint", "outputs", "routed_layers"}
    return {key: value for key, value in run.items() if key not in left_out}


def judge(original: dict[str, Any], twin: dict[str, Any]) -> tuple[Verdict, str]:
    """The verdict on two measurements, and a sentence: what was seen, what to do next."""
    whole, spoiled = original["cumulative"], twin["cumulative"]
    second = f"position 2 accepts {whole[1]:.1%} as grafted and {spoiled[1]:.1%} in the twin"
    if whole[0] < MIN_ACCEPTANCE:
        return "broken", (
            f"position 1 accepts {whole[0]:.1%} of {original['num_drafts']} drafts, so the head "
            "hardly ever predicts this base; check it with `mtp verify --base` and `mtp eval`"
        )
    if whole[1] < MIN_ACCEPTANCE:
        return "broken", (
            f"position 2 accepts {whole[1]:.1%} with every layer whole, too little to compare; "
            "pass --data with prompts like those the head was trained for, and see whether "
            "`mtp eval` predicts more"
        )
    if all(b >= ALIVE * a for a, b in zip(whole, spoiled, strict=True)):
        how = "not one counter" if _counters(original) == _counters(twin) else "next to nothing"
        todo = (
            "the plugin says that it routes, so report this with vLLM's version and log"
            if original["routed_layers"] > 1
            else "install mtp-graft beside vLLM (pip install --no-deps . in its clone); see that "
            "MTP_GRAFT_ROUTING is not off (docs/serving.md)"
        )
        return "layer 0 only", (
            f"scrambling all layers but the first changed {how} ({second}), so they never run; "
            f"{todo}"
        )
    if spoiled[0] < MIN_ACCEPTANCE:
        return "broken", (
            f"position 1 accepts {whole[0]:.1%} as grafted and {spoiled[0]:.1%} in the twin, "
            "though layer 0 is whole there, so it runs another layer; report this with vLLM's "
            "version and log"
        )
    if spoiled[1] <= DEAD * whole[1]:
        return "routed", (
            f"{second}, so the positions after the first need the layers above the first; "
            "serve it as it is"
        )
    return "broken", (
        f"{second}, and the last position {whole[-1]:.1%} and {spoiled[-1]:.1%}: some positions "
        "run the scrambled layers and others do not; report this with vLLM's version and log"
    )


def _counters(run: dict[str, Any]) -> tuple[int, list[int]]:
    return run["num_drafts"], run["accepted_per_position"]


@contextlib.contextmanager
def scrambled_twin(checkpoint: Path) -> Iterator[Path]:
    """A folder that equals `checkpoint`, but for noise in MTP layers 1..; removed afterwards.

    Files are linked by name, not by inode: it works across owners and file systems, and the links
    are only read. Shards that hold a scrambled tensor are copied first and changed in the copy.

    Raises:
        UserError: the folder cannot be made beside the checkpoint, or has no room.
    """
    source = checkpoint.resolve()
    store = Checkpoint(source)
    tensors = [store.info(name) for name in store.head_names if SCRAMBLED.fullmatch(name)]
    spoiled = {info.shard.name for info in tensors}
    twin: Path | None = None
    try:
        try:
            twin = Path(tempfile.mkdtemp(prefix=f".{source.name}.twin-", dir=source.parent))
            for path in source.iterdir():
                if path.name in spoiled:
                    shutil.copyfile(path, twin / path.name)
                elif path.is_file():
                    (twin / path.name).symlink_to(path.resolve())
            generator = torch.Generator().manual_seed(0)
            for info in tensors:
                noise = NOISE * torch.randn(info.shape, generator=generator)
                with (twin / info.shard.name).open("r+b") as shard:
                    shard.seek(info.offset)
                    shard.write(noise.to(torch_dtype(info.dtype)).view(torch.uint8).numpy())
        except OSError as error:
            size = sum((source / name).stat().st_size for name in spoiled)
            raise UserError(
                f"a folder {source.parent} that can be written, with {size} free bytes",
                error.strerror or str(error),
                "make room there, or move the checkpoint",
            ) from error
        yield twin
    finally:
        if twin is not None:
            shutil.rmtree(twin)
