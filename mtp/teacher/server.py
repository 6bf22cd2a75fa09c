"""Hidden states from a running vLLM: the base on one GPU (or quantized on its own kernels),
training on another.

vLLM's `extract_hidden_states` method keeps the output of a layer for each token and its KV
connector writes it to a file on a folder that both sides see. It is taken **before** the final
norm, which is applied here. Each answer also carries the token that the server chose itself; that
`lm_head` gives the same from the state is checked for every row. A row whose states can't be had
stops the run: it never becomes padding.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from graft.errors import UserError
from graft.reader import Checkpoint
from mtp.teacher.source import BaseEnds, RowBatch, require_own_predictions


def extraction_arguments(
    checkpoint: Checkpoint, states: Path, layers: Sequence[int] = ()
) -> list[str]:
    """What `vllm serve BASE` needs on its command line to write hidden states to `states`.

    `layers`: base layers whose output is asked for beside the last one's.
    """
    last = int(checkpoint.text_config["num_hidden_layers"])
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": sorted({*layers, last})}
        },
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states)},
    }
    return [
        "--speculative-config", json.dumps(speculative),
        "--kv-transfer-config", json.dumps(transfer),
        "--no-enable-prefix-caching",
    ]  # fmt: skip


class ExtractionFailed(Exception):
    """One attempt that gave no states; it may be tried again."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often and how long to try.

    attempts: for one row. max_failures: of all rows together. first_delay: seconds before the
    second attempt; it doubles, with jitter. timeout: seconds for an answer, and for its file.
    """

    attempts: int = 4
    max_failures: int = 20
    first_delay: float = 0.5
    timeout: float = 300.0


class ServerSource(BaseEnds):
    """Hidden states of a vLLM server. A `HiddenSource`, and a `StateMaker` for the cache."""

    name = "vLLM server"

    def __init__(
        self,
        base: Path,
        url: str,
        states: Path,
        *,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        concurrency: int = 16,
        patience: Patience | None = None,
    ) -> None:
        """Read the base's ends and ask the server for its model.

        Args:
            base: the folder that the server serves.
            url: of the server, as http://host:8000.
            states: the folder that the server writes to, as this machine sees it.
            device: where batches go.
            dtype: of batches; float32 on a CPU and bfloat16 on a GPU when not given.
            concurrency: requests at a time.
            patience: attempts, failures, delays.

        Raises:
            UserError: no such server, or a base without embedding, norm or `lm_head`.
        """
        checkpoint = Checkpoint(base)
        super().__init__(checkpoint, device=device, dtype=dtype)
        self._depth = int(checkpoint.text_config["num_hidden_layers"])
        self._url, self._states = url.rstrip("/"), Path(states)
        self._concurrency, self._patience = concurrency, patience or Patience()
        self._failures, self._lock = 0, Lock()
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            self._model = self._ask("/v1/models")["data"][0]["id"]
        except (ExtractionFailed, LookupError, TypeError) as error:
            raise UserError(
                f"a vLLM server at {url}", str(error), "start it as docs/teachers.md says"
            ) from error

    def batch_hidden(self, batch: RowBatch, layers: Sequence[int] = ()) -> torch.Tensor:
        """[B, T, H] after the final norm, or [B, T, (A + 1) * H]; zeros on padding."""
        pairs = zip(batch.input_ids.cpu(), batch.lengths.tolist(), strict=True)
        states = self.row_states([ids[:length] for ids, length in pairs], layers)
        width = batch.input_ids.shape[1]
        hidden = torch.zeros(
            len(states), width, states[0].shape[-1], dtype=self.dtype, device=self.device
        )
        for target, state in zip(hidden, states, strict=True):
            target[: len(state)] = state
        return hidden

    def row_states(
        self, rows: list[torch.Tensor], layers: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """Token ids [T] each -> [T, H] each, after the final norm; with layers, their output first.

        Raises:
            UserError: a row that no attempt gave states for, too many failures altogether, or
                states that do not give the server's own tokens.
        """
        with ThreadPoolExecutor(self._concurrency) as pool:
            return [
                answer.hidden
                for answer in pool.map(functools.partial(self._patiently, layers=layers), rows)
            ]

    def own_predictions(
        self, row: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The server's greedy tokens after `positions` [N], and their log-probabilities."""
        prefixes = [row[: position + 1] for position in positions.tolist()]
        with ThreadPoolExecutor(self._concurrency) as pool:
            answers = list(pool.map(self._patiently, prefixes))
        tokens = torch.tensor([answer.token for answer in answers])
        return tokens, torch.tensor([answer.logprob for answer in answers])

    def _patiently(self, row: torch.Tensor, layers: Sequence[int] = ()) -> _Answer:
        delay = self._patience.first_delay
        for attempt in range(1, self._patience.attempts + 1):
            try:
                if self._failures >= self._patience.max_failures:
                    raise ExtractionFailed("too many failures before it")
                answer = self._extract(row, layers)
                break
            except ExtractionFailed as error:
                with self._lock:
                    self._failures += 1
                    spent = self._failures >= self._patience.max_failures
                if spent or attempt == self._patience.attempts:
                    raise UserError(
                        f"hidden states of a row of {len(row)} tokens from {self._url}",
                        f"{error} (attempt {attempt}, {self._failures} failures in all)",
                        "look at the server's log; a cache goes on where it stopped",
                    ) from error
                time.sleep(delay * random.uniform(0.5, 1.5))
                delay *= 2
        token, logprob = torch.tensor([answer.token]), torch.tensor([answer.logprob])
        final = answer.hidden[-1:, -self.lm_head.shape[1] :]
        require_own_predictions(final, self.lm_head, token, logprob, self._url)
        return answer

    def _extract(self, row: torch.Tensor, layers: Sequence[int]) -> _Answer:
        request = {
            "model": self._model, "prompt": row.tolist(), "max_tokens": 1, "temperature": 0,
            "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        answer = self._ask("/v1/completions", request)
        try:
            choice = answer["choices"][0]
            token, logprob = choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]
            path = self._states / Path(answer["kv_transfer_params"]["hidden_states_path"]).name
        except (LookupError, TypeError) as error:
            raise ExtractionFailed(
                f"an answer without token, log-probability or hidden_states_path ({error!r})"
            ) from error
        states = read_states(path, row, self.lm_head.shape[1], self._patience.timeout)
        if layers and states.shape[1] != len({*layers, self._depth}):
            raise UserError(
                f"a server that extracts layers {sorted({*layers, self._depth})}",
                f"one that extracts {states.shape[1]} of them",
                "start it with these eagle_aux_hidden_state_layer_ids (docs/teachers.md)",
            )
        parts = [states[:, index].to(self.device, self.dtype) for index in self._places(layers)]
        hidden = torch.cat([*parts, self.final_norm(states[:, -1])], dim=-1)
        return _Answer(hidden=hidden, token=token, logprob=logprob)

    def _places(self, layers: Sequence[int]) -> list[int]:
        """Where the outputs of layers stand among those of all that the server extracts."""
        served = sorted({*layers, self._depth})
        return [served.index(layer) for layer in layers]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self._url + path, data=data, headers=headers)
            with self._opener.open(request, timeout=self._patience.timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            reason = error.read(500).decode(errors="replace")
            if 400 <= error.code < 500 and error.code not in (408, 429):
                raise UserError(
                    f"{self._url} to take this request", f"status {error.code}: {reason}",
                    "serve with a larger --max-model-len, or the base that the data is for",
                ) from error  # fmt: skip
            raise ExtractionFailed(f"status {error.code}: {reason}") from error
        except (OSError, ValueError) as error:
            raise ExtractionFailed(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class _Answer:
    hidden: torch.Tensor
    token: int
    logprob: float


def read_states(path: Path, row: torch.Tensor, hidden_size: int, timeout: float) -> torch.Tensor:
    """Read and remove one file of vLLM's ExampleHiddenStatesConnector.

    The writer holds an exclusive lock on `path`.lock until the file is whole.

    Args:
        path: holds `hidden_states` [T, A, H] of A layers and `token_ids` [T].
        row: [T] the ids that were sent.
        hidden_size: H.
        timeout: seconds to wait for the lock.

    Returns:
        [T, A, H]; the last layer's is before the final norm.

    Raises:
        ExtractionFailed: no file in time, or one that is broken or of another row.
    """
    lock, deadline = path.with_name(path.name + ".lock"), time.monotonic() + timeout
    while True:
        try:
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ExtractionFailed(f"{path} was not written in {timeout:g} s") from error
            time.sleep(0.005)
    try:
        tensors = load_file(path)
        hidden, ids = tensors["hidden_states"], tensors["token_ids"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ExtractionFailed(f"{path}: {error}") from error
    finally:
        for file in (path, lock):
            with contextlib.suppress(OSError):
                file.unlink()
    is_shaped = hidden.dim() == 3 and hidden.shape[::2] == (len(row), hidden_size)
    if not torch.equal(ids, row.to(ids)) or not is_shaped:
        raise ExtractionFailed(f"{path} holds {list(hidden.shape)} of another row")
    if not bool(torch.isfinite(hidden).all()):
        raise ExtractionFailed(f"{path} holds values that are not finite")
    return hidden
