"""The frozen base: hidden states after its final norm, embeddings, `lm_head`, and greedy text.

The head is distilled from, and measured against, exactly this model. Hidden states are taken
after the final norm because that is what vLLM hands to the head; the check in `Teacher.load`
makes sure of it (`lm_head(hidden)` must give the model's own logits).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from graft.errors import UserError
from graft.reader import Checkpoint


def pick_device(name: str = "auto") -> torch.device:
    """The device to run on: "auto" is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@dataclass(frozen=True)
class Teacher:
    """A base in process, frozen, in evaluation mode.

    Attributes:
        model: transformers' causal language model.
        lm_head: [V, H] output matrix (the embedding when tied).
        device: where it lives.
    """

    model: Any
    lm_head: torch.Tensor
    device: torch.device

    @classmethod
    def load(
        cls, base: Path, *, device: str = "auto", dtype: torch.dtype | None = None
    ) -> Teacher:
        """Load a base from a local folder.

        Args:
            base: folder; its shards are checked before transformers reads them.
            device: "auto", "cpu", "cuda", ...
            dtype: float32 on a CPU and bfloat16 on a GPU when not given.

        Raises:
            UserError: a broken checkpoint, an unsupported one, or one whose final hidden state
                does not reproduce its logits.
        """
        import sys

        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        Checkpoint(base).require_supported()
        place = pick_device(device)
        dtype = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        model.to(place).eval().requires_grad_(False)
        teacher = cls(model, model.get_output_embeddings().weight, place)
        teacher._check_final_norm()
        return teacher

    @torch.no_grad()
    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, T] token ids, padded on the right -> [B, T, H] after the final norm."""
        output = self.model.get_decoder()(input_ids=input_ids.to(self.device), use_cache=False)
        return output.last_hidden_state

    @torch.no_grad()
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, T] token ids -> [B, T, H] input embeddings."""
        return self.model.get_input_embeddings()(input_ids.to(self.device))

    @torch.no_grad()
    def _check_final_norm(self) -> None:
        probe = torch.arange(16, device=self.device).unsqueeze(0) % self.lm_head.shape[0]
        logits = self.model(input_ids=probe, use_cache=False).logits.float()
        projected = F.linear(self.hidden(probe), self.lm_head).float()
        if not torch.allclose(logits, projected, rtol=1e-2, atol=1e-2):
            difference = (logits - projected).abs().max().item()
            raise UserError(
                "lm_head(hidden states after the final norm) to give the base's logits",
                f"a difference of {difference:.3g}",
                "check that the base scales nothing between final norm and lm_head",
            )

    @torch.no_grad()
    def continue_greedily(
        self, prompts: list[list[int]], num_tokens: int, *, batch_size: int = 16
    ) -> list[list[int]]:
        """Greedy continuations of exactly `num_tokens` tokens, end-of-turn tokens not special.

        Prompts of equal length share a batch, so that no padding can touch the numerics.
        """
        from mtp.progress import track

        by_length: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(index)
        batches = [
            indices[start : start + batch_size]
            for indices in by_length.values()
            for start in range(0, len(indices), batch_size)
        ]
        continued: dict[int, list[int]] = {}
        for indices in track(batches, "base continues the prompts", unit="batch"):
            tokens = torch.tensor([prompts[i] for i in indices], device=self.device)
            for index, row in zip(indices, self._greedy(tokens, num_tokens), strict=True):
                continued[index] = row
        return [continued[i] for i in range(len(prompts))]

    def _greedy(self, tokens: torch.Tensor, num_tokens: int) -> list[list[int]]:
        # A plain loop: `generate` cannot be told to run past the end-of-turn token without
        # suppressing it, and what the base says there is what a draft is verified against.
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        keyword = cache_keyword(self.model)
        new: list[torch.Tensor] = []
        for _ in range(num_tokens):
            output = self.model(
                input_ids=tokens, use_cache=True, logits_to_keep=1, **{keyword: cache}
            )
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            new.append(tokens)
        return torch.cat(new, dim=1).tolist()


def cache_keyword(model: Any) -> str:
    """Name of the cache argument: `past_key_values` up to transformers 5.2x, `cache` after."""
    import inspect

    decoder = type(model.get_decoder())
    source = inspect.unwrap(decoder.forward)
    return "cache" if "cache" in inspect.signature(source).parameters else "past_key_values"
