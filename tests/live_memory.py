"""What tensors are alive, by torch's own account: every operator's outputs, until they are freed.

Exact and the same on every machine, unlike the resident size of a process. Scratch space inside an
operator is not seen.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graft.reader import Checkpoint
from mtp.acceptance import Continuations
from mtp.data.batches import Batch
from mtp.draft import MTPDraft
from mtp.recipe import HeadRecipe, Recipe, TrainRecipe
from mtp.teacher.source import BaseEnds


class LiveMemory(TorchDispatchMode):
    """Counts bytes of storages that operators inside made.

    Attributes:
        peak: most bytes alive at once.
        largest: bytes of the largest storage, and the shape of the tensor that made it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.largest = 0, 0, (0, ())
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        if size > self.largest[0]:
            self.largest = (size, tuple(tensor.shape))
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


class RandomStates(BaseEnds):
    """A base's ends, with random hidden states: what they are does not matter to memory."""

    def batch_hidden(self, batch: Batch) -> torch.Tensor:
        shape = (*batch.input_ids.shape, self.lm_head.shape[1])
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def long_row_draft(base: Path, *, runtime: str, checkpointing: bool, layers: int = 4) -> MTPDraft:
    """A head of a base under training, without its teacher's layers."""
    recipe = Recipe(
        head=HeadRecipe(num_layers=layers, warm_start="random"),
        train=TrainRecipe(runtime=runtime, activation_checkpointing=checkpointing),
    )
    checkpoint = Checkpoint(base)
    text = Continuations([], [], [], 1, frozenset())
    torch.manual_seed(0)
    source = RandomStates(checkpoint, device="cpu")
    return MTPDraft.from_base(checkpoint, source, recipe, text)


def memory_of_a_step(draft: MTPDraft, length: int, vocabulary: int) -> LiveMemory:
    """Forward and backward of one row of `length` tokens, all supervised, gradients included."""
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
    batch = Batch(
        input_ids=ids, loss_mask=torch.ones(1, length, dtype=torch.bool),
        lengths=torch.tensor([length]), categories=("code",), rows=(0,),
    )  # fmt: skip
    draft.zero_grad(set_to_none=True)
    with LiveMemory() as memory:
        loss, _ = draft(batch, draft.target_weights(batch), 0.0)
        loss.backward()
    return memory
