"""Note every proposal of Model Runner V2's speculator, in whichever process it runs.

The functions are sent to the workers through `LLM.collective_rpc`, so that tensor parallel engines
are recorded like others. Only copies on the device are kept, in order: with asynchronous scheduling
the host does not know yet what was accepted, and reading it back would take the overlap away that
is to be tested.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch


def attach(worker: Any) -> str:
    """Record from now on; returns the speculator's class name."""
    runner = worker.model_runner
    propose, records = runner.speculator.propose, []
    signature = inspect.signature(propose)

    @functools.wraps(propose)
    def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = propose(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if not given.get("dummy_run"):
            batch = given["input_batch"]
            kept = (batch.seq_lens, given["num_sampled"], given["num_rejected"], drafts)
            count = batch.num_reqs
            records.append((list(batch.req_ids), *(tensor[:count].clone() for tensor in kept)))
        return drafts

    runner.speculator.propose = recording
    runner.recorded_proposals = records
    return type(runner.speculator).__name__


def collect(worker: Any) -> dict[str, Any]:
    """What was proposed: drafts as (request, num_known, tokens), and what the batches were like."""
    drafts, batch_sizes, num_chunk_ends = [], set(), 0
    for ids, *tensors in worker.model_runner.recorded_proposals:
        lengths, sampled, rejected, tokens = (tensor.tolist() for tensor in tensors)
        batch_sizes.add(len(ids))
        for i, request in enumerate(ids):
            if sampled[i] == 0:  # in the middle of its prompt
                num_chunk_ends += 1
                continue
            # The window ends at lengths[i], without what was rejected; one token was sampled.
            drafts.append((request, lengths[i] - rejected[i] + 1, tokens[i]))
    return {
        "drafts": drafts,
        "batch_sizes": sorted(batch_sizes),
        "num_chunk_ends": num_chunk_ends,
    }


def drop_index(worker: Any) -> None:
    """Negative control: every position runs layer 0 (an engine without graphs)."""
    model = unwrapped(worker)
    forward = model.forward

    def without_index(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs | {"spec_step_idx": 0})

    model.forward = without_index


def forget_stale(worker: Any) -> None:
    """Negative control: what is run again after a rejection is run on wrong hidden states."""
    speculator = worker.model_runner.speculator
    propose = speculator.propose

    @functools.wraps(propose)
    def forgetting(*args: Any, **kwargs: Any) -> torch.Tensor:
        speculator.cached_target_hidden_states.zero_()
        return propose(*args, **kwargs)

    speculator.propose = forgetting


def forget_next_prompt_tokens(worker: Any) -> None:
    """Negative control: at the end of a prompt chunk, drafts are appended, not the prompt."""
    speculator = worker.model_runner.speculator
    propose = speculator.propose
    signature = inspect.signature(propose)

    @functools.wraps(propose)
    def forgetting(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs)
        # Row 0 seeds the first step; the later rows override the drafts.
        given.arguments["next_prefill_tokens"] = given.arguments["next_prefill_tokens"].clone()
        given.arguments["next_prefill_tokens"][1:] = -1
        return propose(*given.args, **given.kwargs)

    speculator.propose = forgetting


def unwrapped(worker: Any) -> Any:
    model = worker.model_runner.speculator.model
    return model.unwrap() if hasattr(model, "unwrap") else model


SABOTAGE = {
    "index dropped": drop_index,
    "stale entries": forget_stale,
    "known tokens": forget_next_prompt_tokens,
}
