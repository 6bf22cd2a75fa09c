"""The frozen base in process: hidden states after its final norm, and greedy text.

The head is distilled from, and measured against, exactly this model. Hidden states are taken
after the final norm because that is what vLLM hands to the head; the check in `Teacher.load`
makes sure of it (`lm_head(hidden)` must give the model's own logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from graft.errors import UserError
from graft.formats import describe_quantization
from graft.reader import Checkpoint
from mtp.head import cache_keyword
from mtp.teacher.dequantize import load_dequantized
from mtp.teacher.device import pick_device, pick_dtype
from mtp.teacher.packed import is_packed
from mtp.teacher.source import RowBatch, base_autocast


@dataclass(frozen=True)
class Teacher:
    """A base in process, frozen, in evaluation mode.

    Attributes:
        model: transformers' causal language model.
        lm_head: [V, H] output matrix (the embedding when tied).
        device: where it lives.
        name: what a cache records as its origin.
    """

    model: Any
    lm_head: torch.Tensor
    device: torch.device
    name: str = "in process"

    @classmethod
    def load(cls, base: Path, *, device: str = "auto", dtype: torch.dtype | None = None) -> Teacher:
        """Load a base from a local folder.

        Args:
            base: folder; its shards are checked before they are read. Quantized weights are
                unpacked on the way in (`mtp.teacher.dequantize`).
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
        checkpoint = Checkpoint(base)
        checkpoint.require_supported()
        place = pick_device(device)
        dtype = dtype or pick_dtype(place)
        if describe_quantization(checkpoint) is not None or is_packed(checkpoint):
            model = load_dequantized(checkpoint, device=place, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                base, dtype=dtype, local_files_only=True, trust_remote_code=False
            )
        model.to(place).eval().requires_grad_(False)
        teacher = cls(model, model.get_output_embeddings().weight, place)
        teacher._check_final_norm()
        return teacher

    def autocast(self) -> torch.autocast:
        """bfloat16 arithmetic where the base itself runs in it; nothing in float32."""
        return base_autocast(self.device, self.lm_head.dtype)

    @torch.no_grad()
    def hidden(self, input_ids: torch.Tensor, layers: Sequence[int] = ()) -> torch.Tensor:
        """[B, T] token ids, padded on the right -> [B, T, H] after the final norm; with A layers
        [B, T, (A + 1) * H], their output first."""
        decoder = self.model.get_decoder()
        outputs: dict[int, torch.Tensor] = {}

        def keep(layer: int, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        hooks = [
            decoder.layers[layer - 1].register_forward_hook(
                lambda _, __, output, layer=layer: keep(layer, output)
            )
            for layer in layers
        ]
        try:
            final = decoder(input_ids=input_ids.to(self.device), use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([*(outputs[layer] for layer in layers), final], dim=-1)

    def batch_hidden(self, batch: RowBatch, layers: Sequence[int] = ()) -> torch.Tensor:
        """`hidden` of a batch of training rows."""
        return self.hidden(batch.input_ids, layers)

    def row_states(
        self, rows: list[torch.Tensor], layers: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """Token ids [T] each -> `hidden` of each, [T, H] without layers; one forward pass."""
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        hidden = self.hidden(padded, layers)
        return [state[: len(row)] for state, row in zip(hidden, rows, strict=True)]

    @torch.no_grad()
    def own_predictions(
        self, row: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's greedy tokens after `positions` [N] of `row` [T], and their log-probabilities.

        By the model's own output path, not by `lm_head` here.
        """
        keep = positions.to(self.device)
        output = self.model(
            input_ids=row[None].to(self.device), use_cache=False, logits_to_keep=keep
        )
        top = output.logits[0].float().log_softmax(-1).max(-1)
        return top.indices, top.values

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
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[list[int]]:
        """Greedy continuations of exactly `num_tokens` tokens, end-of-turn tokens not special."""
        from mtp.progress import track

        batch_size = 16 if self.device.type == "cpu" else 64

        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        continued: dict[int, list[int]] = {}
        for indices in track(batches, "base continues the prompts", unit="batch"):
            rows = self._greedy([prompts[index] for index in indices], num_tokens)
            continued.update(zip(indices, rows, strict=True))
        return [continued[index] for index in range(len(prompts))]

    def _greedy(self, prompts: list[Sequence[int]], num_tokens: int) -> list[list[int]]:
        # A plain loop: `generate` cannot be told to run past the end-of-turn token without
        # suppressing it, and what the base says there is what a draft is verified against.
        # Rows start together at the shortest prompt and longer ones are fed their own tokens
        # until they end, so that no padding can touch the numerics.
        from transformers import DynamicCache

        cache = {
            cache_keyword(type(self.model.get_decoder())): DynamicCache(config=self.model.config)
        }
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        shortest, longest = int(lengths.min()), int(lengths.max())
        tokens = torch.zeros(
            len(prompts), longest + num_tokens, dtype=torch.long, device=self.device
        )
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        start = 0
        for end in range(shortest, longest + num_tokens):
            output = self.model(
                input_ids=tokens[:, start:end], use_cache=True, logits_to_keep=1, **cache
            )
            guessed = output.logits[:, -1].argmax(-1)
            tokens[:, end] = torch.where(lengths > end, tokens[:, end], guessed)
            start = end
        return [
            row[length : length + num_tokens].tolist()
            for row, length in zip(tokens, lengths.tolist(), strict=True)
        ]
