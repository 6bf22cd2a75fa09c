"""A stand-in for vLLM with hidden-state extraction: its HTTP answers, its files, its locks.

The shapes of answers and files are those of vLLM 0.32 and 0.33 (`ExampleHiddenStatesConnector`);
tests/vllm/test_hidden_states.py runs the same client against the real one.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


class StatesServer(ThreadingHTTPServer):
    """Serves a `Teacher`. `fault(number, tensors)` may break the file of request `number`.

    A fault returns tensors, or None for no file; an integer is an HTTP status.
    """

    def __init__(self, teacher: Any, states: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.teacher, self.states = teacher, states
        self.fault: Callable[[int, dict], Any] = lambda number, tensors: tensors
        self.num_requests, self.lock = 0, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def compute(self, ids: torch.Tensor) -> tuple[torch.Tensor, int, float]:
        """[T, 1, H] before the final norm, the greedy token, and its log-probability."""
        kept = []
        norm = self.teacher.model.get_decoder().norm
        with self.lock:
            handle = norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
            argmax, logprob = self.teacher.own_predictions(ids, torch.tensor([len(ids) - 1]))
            handle.remove()
        return kept[0][0][:, None].contiguous(), int(argmax), float(logprob)


class _Handler(BaseHTTPRequestHandler):
    server: StatesServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "base"}]})

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = server.num_requests = server.num_requests + 1
        ids = torch.tensor(request["prompt"])
        hidden, token, logprob = server.compute(ids)
        tensors = server.fault(number, {"hidden_states": hidden, "token_ids": ids})
        if isinstance(tensors, int):
            self.answer(tensors, {"error": "as told"})
            return
        path = server.states / f"cmpl-{number}.safetensors"
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        choice = {"token_ids": [token], "logprobs": {"token_logprobs": [logprob]}}
        where = {"hidden_states_path": f"/elsewhere/{path.name}"}
        self.answer(200, {"choices": [choice], "kv_transfer_params": where})
        time.sleep(0.01)  # vLLM writes after it has answered, and holds the lock meanwhile
        if tensors is not None:
            save_file(tensors, path)
        lock.close()
