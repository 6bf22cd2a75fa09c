"""The whole-window chain for vLLM's Model Runner V1.

Stock V1 runs step 0 over all tokens and every later step over one token. Distinct layers cannot
work like that: layers 1.. would have no keys and values for the prompt. Here every speculative
step runs its own module over the whole query window, as Model Runner V2's multi-module speculator
does (vllm/v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py):

- Module k at position i reads module k-1's hidden state at i and the embedding of token i+k+1.
  Positions stay; the ids shift left by one a step and the newest draft is appended.
- At the end of a prompt chunk the next tokens are known, so they are appended instead of drafts.
- After a rejection, module k's entries for up to k earlier positions were made from rejected
  drafts. They are run again: the rows of the rejected drafts in the query window are free, and
  hold as many earlier positions as can be stale. That needs the ids and hidden states of those
  positions, which `History` keeps.

No value is read back from the device, so asynchronous scheduling keeps its overlap.

Shapes: B requests, N tokens of the batch, K speculative steps, H hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from mtp.serving.vllm_history import History, broadcast_mask


class WindowChain:
    """`propose` for one V1 drafter whose model has several MTP layers.

    Args:
        proposer: vLLM's EagleProposer; its buffers, metadata builders and sampling are used.
        runner: the model runner, for the known tokens of unfinished prompts.
        reprefill: run stale positions again. Off only in tests, to see that it matters.
    """

    def __init__(self, proposer: Any, runner: Any, reprefill: bool = True) -> None:
        self.proposer, self.runner, self.reprefill = proposer, runner, reprefill
        self.num_steps: int = proposer.speculative_config.num_speculative_tokens
        self.history: History | None = None

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """Draft tokens, [B, num_speculative_tokens]; the parameters are vLLM's."""
        proposer = self.proposer
        proposer.num_speculative_tokens = num_speculative_tokens
        proposer._last_draft_probs = None
        known = self._known_tokens(common_attn_metadata)
        if known is not None:
            next_token_ids = torch.where(known[:, 0] >= 0, known[:, 0], next_token_ids)
        num_tokens, last, metadata = proposer.set_inputs_first_pass(
            target_token_ids=target_token_ids,
            next_token_ids=next_token_ids,
            target_positions=target_positions,
            target_hidden_states=target_hidden_states,
            token_indices_to_sample=token_indices_to_sample,
            cad=common_attn_metadata,
            num_rejected_tokens_gpu=num_rejected_tokens_gpu,
        )
        if proposer.supports_mm_inputs:
            embeddings, is_multimodal = mm_embed_inputs or (None, None)
            proposer.inputs_embeds[:num_tokens] = proposer.model.embed_input_ids(
                proposer.input_ids[:num_tokens],
                multimodal_embeddings=embeddings,
                is_multimodal=is_multimodal,
            )
        metadata, last = self._insert_stale(metadata, last, num_tokens, num_rejected_tokens_gpu)
        drafts, probabilities = self._run(metadata, last, num_tokens, sampling_metadata, known)
        if probabilities:
            stacked = torch.stack(probabilities[:num_speculative_tokens], dim=1)
            proposer._last_draft_probs = stacked.contiguous()
        # Every module ran, whatever was asked for: later windows attend to all caches.
        return torch.stack(drafts, dim=1)[:, :num_speculative_tokens]

    def _run(
        self,
        metadata: Any,
        last: torch.Tensor,
        num_tokens: int,
        sampling_metadata: Any,
        known: torch.Tensor | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run K modules over the window in the buffers; K tensors of [B] drafts."""
        from vllm.forward_context import set_forward_context

        proposer = self.proposer
        _, per_layer = proposer.build_per_group_and_layer_attn_metadata(metadata)
        drafts: list[torch.Tensor] = []
        probabilities: list[torch.Tensor] = []
        for step in range(self.num_steps):
            if step < 2:
                # Twice, as in stock vLLM: with data parallelism each call is a collective, and
                # idle ranks make two in their dummy run. No graphs: they would freeze the index.
                mode, padded, across = proposer._determine_batch_execution_and_padding(
                    num_tokens, use_cudagraphs=False
                )
            if getattr(proposer, "eplb_state", None) is not None:
                proposer.eplb_state.prepare_forward(proposer.draft_model_config, num_tokens)
            embeds = proposer.inputs_embeds[:padded] if proposer.supports_mm_inputs else None
            with set_forward_context(
                per_layer,
                proposer.vllm_config,
                num_tokens=padded,
                num_tokens_across_dp=across,
                cudagraph_runtime_mode=mode,
                slot_mapping=proposer._get_slot_mapping(padded, metadata.slot_mapping),
            ):
                hidden = proposer.model(
                    input_ids=proposer.input_ids[:padded] if embeds is None else None,
                    positions=proposer._get_positions(padded),
                    hidden_states=proposer.hidden_states[:padded],
                    inputs_embeds=embeds,
                    spec_step_idx=step,
                )
            draft, probability = proposer._sample_draft_tokens(hidden[last], sampling_metadata)
            drafts.append(draft)
            if probability is not None:
                probabilities.append(probability)
            if step + 1 < self.num_steps:
                proposer.hidden_states[:num_tokens] = hidden[:num_tokens]
                if known is not None:
                    draft = torch.where(known[:, step + 1] >= 0, known[:, step + 1], draft)
                self._shift(num_tokens, last, draft)
        return drafts, probabilities

    def _shift(self, num_tokens: int, last: torch.Tensor, token: torch.Tensor) -> None:
        """Move the input ids one to the left and append `token` [B] at rows `last` [B]."""
        proposer = self.proposer
        ids = proposer.input_ids
        ids[: num_tokens - 1] = ids[1:num_tokens].clone()
        ids[last] = token.to(ids.dtype)
        if proposer.supports_mm_inputs:
            embeds = proposer.inputs_embeds
            embeds[: num_tokens - 1] = embeds[1:num_tokens].clone()
            embeds[last] = proposer.model.embed_input_ids(token.to(ids.dtype))

    def _known_tokens(self, metadata: Any) -> torch.Tensor | None:
        """The K tokens behind each unfinished prompt chunk, [B, K] int32, -1 where none is known.

        None when no request of the batch is in the middle of its prompt.
        """
        num_requests = metadata.num_reqs
        unfinished = np.nonzero(self.runner.discard_request_mask.np[:num_requests])[0]
        if len(unfinished) == 0:
            return None
        batch = self.runner.input_batch
        lengths = np.diff(metadata.query_start_loc_cpu.numpy())
        known = np.full((num_requests, self.num_steps), -1, dtype=np.int32)
        for i in unfinished:
            end = int(batch.num_computed_tokens_cpu[i]) + int(lengths[i])
            stop = min(end + self.num_steps, int(batch.num_tokens_no_spec[i]))
            known[i, : stop - end] = batch.token_ids_cpu[i, end:stop]
        return torch.from_numpy(known).to(self.proposer.device)

    def _buffers(self) -> list[torch.Tensor]:
        proposer = self.proposer
        positions = proposer._get_positions(proposer.max_num_tokens)
        buffers = [proposer.input_ids, proposer.hidden_states]
        # M-RoPE keeps [3, N]; the view has the token dimension first.
        buffers.append(positions.T if positions.dim() == 2 else positions)
        if proposer.supports_mm_inputs:
            buffers.append(proposer.inputs_embeds)
        return buffers

    def _insert_stale(
        self,
        metadata: Any,
        last: torch.Tensor,
        num_tokens: int,
        num_rejected: torch.Tensor | None,
    ) -> tuple[Any, torch.Tensor]:
        """Move each window right over its rejected rows and put earlier positions before it.

        With K drafts, a of them accepted, module k's entries are stale at the last k - a
        positions before the window, so K-1-a positions suffice. r rejected rows are free.

        Returns:
            The metadata of the moved windows and the rows to sample from.
        """
        buffers = self._buffers()
        if self.history is None:
            num_rows = 2 * self.proposer.max_batch_size
            self.history = History(buffers, num_rows, self.num_steps - 1)
        history, num_requests = self.history, metadata.num_reqs
        rows = history.rows(self.runner.input_batch.req_ids[:num_requests], self.runner.requests)
        bounds = metadata.query_start_loc[: num_requests + 1].long()
        starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
        first = metadata.seq_lens[:num_requests].long() - lengths
        rejected = torch.zeros_like(lengths) if num_rejected is None else num_rejected.long()
        gap = torch.minimum(rejected, rejected + self.num_steps - lengths).clamp(min=0)
        gap = torch.minimum(gap, history.count[rows])
        gap = torch.where(history.end[rows] == first, gap, 0)
        remembered = [column[rows] for column in history.columns]
        history.push(rows, buffers, starts, first, lengths - rejected)
        # Without padded batches the rejected rows are gone already; with decode context
        # parallelism the slots are not where this arithmetic puts them.
        if (
            num_rejected is None
            or not self.reprefill
            or getattr(metadata, "dcp_local_seq_lens", None) is not None
        ):
            return metadata, last

        request = torch.repeat_interleave(
            torch.arange(num_requests, device=rows.device), lengths, output_size=num_tokens
        )
        row = torch.arange(num_tokens, device=rows.device)
        offset, shift = row - starts[request], gap[request]
        stale = offset < shift
        entry = (history.depth - shift + offset).clamp(max=history.depth - 1)
        for buffer, column in zip(buffers, remembered, strict=True):
            moved = buffer[(row - shift).clamp(min=0)]
            buffer[:num_tokens] = torch.where(
                broadcast_mask(stale, moved), column[request, entry], moved
            )
        index = (first - gap)[request] + offset
        block_size = self.proposer.block_size
        block = metadata.block_table_tensor[request, index // block_size].long()
        # Cached copies of replaced fields, where this vLLM has them.
        caches = {
            field.name: None
            for field in dataclasses.fields(metadata)
            if field.name in ("_seq_lens_cpu", "_num_computed_tokens_cpu",
                              "_num_computed_tokens_cache")
        }  # fmt: skip
        moved_metadata = dataclasses.replace(
            metadata,
            seq_lens=(metadata.seq_lens[:num_requests] - gap).to(metadata.seq_lens.dtype),
            slot_mapping=block * block_size + index % block_size,
            **caches,
        )
        return moved_metadata, last + gap.to(last.dtype)
