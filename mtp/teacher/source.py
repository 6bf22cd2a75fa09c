"""What training needs of a base, wherever its hidden states come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from graft.errors import UserError
from graft.layout import base_tensor_names
from graft.reader import Checkpoint
from mtp.teacher.device import pick_device, pick_dtype
from mtp.teacher.packed import find_weight, fp8_block, load_weight


class RowBatch(Protocol):
    """The part of `mtp.data.batches.Batch` that a source reads.

    input_ids [B, T] int64, padded on the right; lengths [B]; rows: each row's index in its split.
    """

    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def rows(self) -> tuple[int, ...]: ...


class HiddenSource(Protocol):
    """A frozen base as training sees it.

    batch_hidden: [B, T, H] hidden states after the final norm, on `device`; what stands at padded
        positions is not defined. With A `layers`, [B, T, (A + 1) * H]: before it the output of
        these base layers, counted from 1 (a number of layers finished), in their order.
    embed: [B, T] token ids -> [B, T, H] input embeddings.
    lm_head: [V, H] output matrix.
    autocast: the arithmetic that the base runs in.
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def lm_head(self) -> torch.Tensor: ...
    def autocast(self) -> torch.autocast: ...
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor: ...
    def batch_hidden(self, batch: RowBatch, layers: Sequence[int] = ()) -> torch.Tensor: ...


def base_autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """bfloat16 arithmetic where the base itself runs in it; nothing in float32."""
    enabled = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if enabled else None, enabled=enabled)


class BaseEnds:
    """A base without its layers: embedding, final norm and `lm_head`, read from the shards.

    About 1 GB each for embedding and `lm_head` at the 35B's sizes, instead of 70 GB.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, device: str = "auto", dtype: torch.dtype | None = None
    ) -> None:
        """Read the ends of `checkpoint`, unpacked where quantized.

        Raises:
            UserError: no such device, or a checkpoint without these tensors.
        """
        self.device = pick_device(device)
        self.dtype = dtype or pick_dtype(self.device)
        names, block = base_tensor_names(checkpoint), fp8_block(checkpoint)

        def read(name: str) -> torch.Tensor:
            weight = find_weight(checkpoint, name)
            return load_weight(checkpoint, weight, self.device, block).to(self.dtype)

        self.embedding = read(names.embed)
        self.lm_head = self.embedding if names.lm_head is None else read("lm_head.weight")
        self._norm = read(names.final_norm).float()
        self._epsilon = float(checkpoint.text_config.get("rms_norm_eps", 1e-6))

    def autocast(self) -> torch.autocast:
        """bfloat16 arithmetic where the base itself runs in it; nothing in float32."""
        return base_autocast(self.device, self.dtype)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, T] token ids -> [B, T, H] input embeddings."""
        return F.embedding(input_ids.to(self.device), self.embedding)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] before the final norm -> after it: RMSNorm with zero-centred weights."""
        wide = hidden.to(self.device).float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return (wide * (1 + self._norm)).to(self.dtype)


def require_own_predictions(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    argmax: torch.Tensor,
    logprob: torch.Tensor,
    where: Path | str,
) -> float:
    """Refuse states from which `lm_head` does not give what the base itself predicted.

    This is what tells states after the final norm from those before it, and a right base from a
    wrong one. The tolerance is that of BF16 logits: a prediction may differ in a near-tie only,
    and the log-probability by 2**-6 of the logit.

    Args:
        hidden: [N, H] after the final norm.
        lm_head: [V, H].
        argmax: [N] the base's own greedy tokens.
        logprob: [N] their log-probabilities, by the base itself.
        where: what the states are of, for the message.

    Returns:
        The share of positions with exactly the base's argmax.

    Raises:
        UserError: any position outside the tolerance, or a state that is not finite.
    """
    logits = F.linear(hidden.to(lm_head.device, lm_head.dtype), lm_head).float()
    own = argmax.to(logits.device).long()
    chosen = logits.gather(-1, own[:, None])[:, 0]
    top = logits.max(-1).values
    found = chosen - logits.logsumexp(-1)
    tolerance = 0.02 + top.abs() / 64
    fits = (top - chosen <= tolerance) & ((found - logprob.to(found)).abs() <= tolerance)
    if not bool(fits.all()):
        raise UserError(
            f"lm_head(hidden states after the final norm) to give the base's own predictions "
            f"({where})",
            f"{int((~fits).sum())} of {len(fits)} positions where it does not",
            "use states of exactly this base, after the final norm",
        )
    return float((logits.argmax(-1) == own).float().mean())
