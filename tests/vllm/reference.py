"""The whole-window chain in plain torch, and a recorder of what vLLM really drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Draft:
    """One proposal: `tokens` were drafted for a request when `num_known` of its tokens were."""

    request: str
    num_known: int
    tokens: list[int]


@dataclass
class Recorder:
    """Notes every proposal of an in-process engine on Model Runner V1."""

    drafts: list[Draft] = field(default_factory=list)
    num_chunk_ends: int = 0
    batch_sizes: set[int] = field(default_factory=set)

    def attach(self, llm: Any) -> Recorder:
        runner = model_runner(llm)
        propose = runner.drafter.propose

        def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
            drafts = propose(*args, **kwargs)
            ids = runner.input_batch.req_ids
            self.batch_sizes.add(len(ids))
            unfinished = runner.discard_request_mask.np[: len(ids)]
            metadata = kwargs["common_attn_metadata"]
            rejected = kwargs.get("num_rejected_tokens_gpu")
            for i, request in enumerate(ids):
                if unfinished[i]:
                    self.num_chunk_ends += 1
                    continue
                known = int(metadata.seq_lens[i]) + 1
                if rejected is not None:
                    known -= int(rejected[i])
                self.drafts.append(Draft(request, known, drafts[i].tolist()))
            return drafts

        runner.drafter.propose = recording
        return self


def model_runner(llm: Any) -> Any:
    """The model runner of an in-process engine (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


class ReferenceChain:
    """Base and head of a checkpoint in float32, without any cache."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file
        from transformers import Qwen3_5MoeForCausalLM

        from mtp.head import MTPHead

        self.base = Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
        text_config = self.base.config.to_dict()
        self.head = MTPHead(text_config, text_config["mtp_num_hidden_layers"]).float()
        tensors = load_file(folder / "model.safetensors")
        self.head.load_state_dict(
            {n.removeprefix("mtp."): t for n, t in tensors.items() if n.startswith("mtp.")},
            strict=True,
        )

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Base hidden states after the final norm, [1, T, H]."""
        return self.base.model(torch.tensor([tokens])).last_hidden_state

    @torch.inference_mode()
    def drafts(
        self, tokens: list[int], hidden: torch.Tensor, num_steps: int
    ) -> tuple[list[int], list[float]]:
        """Drafts after `tokens`, and how far each one's logit is above the second best.

        Args:
            tokens: all known tokens; the last one has no base hidden state yet.
            hidden: base hidden states of at least all but the last, [1, T, H].
            num_steps: drafts wanted.
        """
        window = len(tokens) - 1
        state, positions = hidden[:, :window], torch.arange(window)
        ids, drafts, margins = torch.tensor([tokens[1:]]), [], []
        for step in range(num_steps):
            embeddings = self.base.model.embed_tokens(ids)
            state = self.head.step(step % self.head.num_layers, state, embeddings, positions)
            best = self.base.lm_head(state[0, -1]).topk(2)
            drafts.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            ids = torch.cat([ids[:, 1:], torch.tensor([[drafts[-1]]])], dim=1)
        return drafts, margins
