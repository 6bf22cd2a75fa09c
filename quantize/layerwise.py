"""A head's chain over many rows with one layer in memory at a time.

A full-size head takes 6.7 GB in BF16 and twice that in float32, beside the base. Calibration and
the replay of acceptance need each layer only while its own steps run, so the loop is turned inside
out: step by step over all rows, and between two steps one layer's weights make room for the next.
What is kept are the hidden states between steps, tokens x hidden size.

The steps are those of `MTPHead.chains`, one by one; tests hold both against each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from graft.formats import dequantize_head
from graft.layout import fuse_experts
from graft.manifest import HeadFolder
from mtp.head import MTPHead
from mtp.progress import track
from mtp.teacher.source import HiddenSource

_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


class Visit:
    """One layer's turn: it runs on the same inputs as often as `run` is called.

    Attributes:
        layer: whose weights the turn needs.
        steps: the speculative steps that it runs; none where the runtime never runs the layer.
        outputs: after the first `run`: for each row, the hidden states [1, T-1-k, H] of each step.
    """

    def __init__(self, layer: int, steps: Sequence[int], chain: _Chain) -> None:
        self.layer, self.steps, self._chain = layer, tuple(steps), chain
        self.outputs: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def run(self, head: MTPHead) -> list[list[torch.Tensor]]:
        """Run the turn with `head`, from `load_layer`; returns its own outputs."""
        rows = range(len(self._chain.rows))
        description = f"layer {self.layer}"
        found = [self._chain.run(head, self, row) for row in track(rows, description, unit="row")]
        self.outputs = self.outputs or found
        return found


class _Chain:
    """Rows of token ids [1, T], and the states that the next routed step reads."""

    def __init__(
        self, source: HiddenSource, rows: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
    ) -> None:
        self.source, self.rows = source, rows
        self.states = [state.to(source.device).float() for state in states]

    def run(self, head: MTPHead, visit: Visit, row: int) -> list[torch.Tensor]:
        states = self.states[row]
        embeddings = self.source.embed(self.rows[row]).float()
        if len(visit.steps) > 1:
            return head.chain_stock(states, embeddings, len(visit.steps))
        step = embeddings.shape[1] - states.shape[1]
        window = states.shape[1] - 1
        if window < 1:
            return []
        positions = torch.arange(window, device=states.device)
        return [head.step(0, states[:, :window], embeddings[:, step + 1 :], positions)]

    def advance(self, outputs: list[list[torch.Tensor]]) -> None:
        """What the first step of a visit gave is what the next layer reads."""
        self.states = [found[0] if found else state[:, :1] for found, state in
                       zip(outputs, self.states, strict=True)]  # fmt: skip


def visits(
    source: HiddenSource,
    rows: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    num_layers: int,
    num_steps: int,
    *,
    stock: bool,
    idle_layers: bool = False,
) -> Iterator[Visit]:
    """Every layer's turns, in the order of the chain. Each must be `run` before the next is taken.

    Args:
        source: the base's embedding.
        rows: [1, T] token ids each.
        states: [1, T, H] each, of the base after its final norm: what the chain starts from.
        num_layers: K.
        num_steps: speculative steps; routed, step k runs layer k % K.
        stock: an unpatched vLLM: layer 0 runs all steps.
        idle_layers: also visit the layers that no step runs, where a routed runtime would run them.
    """
    chain = _Chain(source, rows, states)
    plan: list[tuple[int, tuple[int, ...]]]
    plan = [(step % num_layers, (step,)) for step in range(num_steps)]
    if stock:
        plan = [(0, tuple(range(num_steps)))]
    if idle_layers:
        plan += [(layer, ()) for layer in range(1, num_layers) if stock or layer >= num_steps]
    for layer, steps in plan:
        visit = Visit(layer, steps, chain)
        yield visit
        chain.advance(visit.outputs)


def load_layer(
    source: HeadFolder,
    layer: int,
    device: torch.device,
    experts_implementation: str = "grouped_mm",
) -> MTPHead:
    """A head of one layer, in float32, that computes what layer `layer` of `source` does.

    Args:
        source: a head of any form; NVFP4 experts are dequantized.
        layer: which.
        device: where.
        experts_implementation: "eager" for modelopt.
    """
    prefix = f"mtp.layers.{layer}."
    tensors = layer_tensors(source, layer)
    tensors |= {n: source.load(n) for n in source.names if not n.startswith("mtp.layers.")}
    state = {}
    for name in list(tensors):  # taken out one by one, so that both forms never lie side by side
        short = name.replace(prefix, "mtp.layers.0.", 1).removeprefix("mtp.")
        state[short] = tensors.pop(name).float()
    head = MTPHead(source.metadata["text_config"], 1, experts_implementation)
    head.load_state_dict(state, strict=True, assign=True)
    return head.to(device).eval().requires_grad_(False)


def layer_tensors(source: HeadFolder, layer: int) -> dict[str, torch.Tensor]:
    """One layer's tensors by their names in the head, experts fused and dequantized.

    Experts that are stored one by one go into their stack one by one: all of them at once beside
    the stack took 3.4 GB more at a 35B's sizes, in pieces so small that malloc kept them.
    """
    plain: dict[str, torch.Tensor] = {}
    experts: dict[int, dict[str, str]] = {}  # by expert, each name as that of expert 0
    for name in source.names:
        if not name.startswith(f"mtp.layers.{layer}."):
            continue
        if found := _ONE_EXPERT.fullmatch(name):
            experts.setdefault(int(found[2]), {})[f"{found[1]}.0.{found[3]}"] = name
        else:
            plain[name] = source.load(name)
    stacks: dict[str, torch.Tensor] = {}
    for row, expert in enumerate(sorted(experts)):
        stored = {alone: source.load(name) for alone, name in experts[expert].items()}
        for name, value in fuse_experts(dequantize_head(stored)).items():
            if name not in stacks:
                stacks[name] = value.new_empty(len(experts), *value.shape[1:])
            stacks[name][row] = value[0]
    return plain | stacks
