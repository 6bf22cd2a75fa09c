"""Hidden states out of a real vLLM server, against transformers on the same base."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from graft.errors import UserError
from graft.reader import Checkpoint
from mtp.teacher import Teacher
from mtp.teacher.server import ServerSource, extraction_arguments

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(demo, vllm_python, tmp_path_factory):
    """(url, folder of states) of a vLLM that serves the demo's base and extracts."""
    states = tmp_path_factory.mktemp("states")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        argument.replace(
            '"ExampleHiddenStatesConnector"',
            '"CpuHiddenStatesConnector", "kv_connector_module_path": "mtp.serving.vllm_cpu_states"',
        )
        for argument in extraction_arguments(Checkpoint(demo / "base"), states)
    ]
    command = [
        str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model",
        str(demo / "base"), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "256", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (states / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while True:
            assert process.poll() is None, (states / "server.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "no server in 300 s"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield url, states
    finally:
        process.terminate()
        process.wait(60)


def rows(vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (n,), generator=generator) for n in (1, 7, 40, 16, 200)]


def test_states_of_the_server_are_those_of_transformers(server, demo):
    teacher = Teacher.load(demo / "base", device="cpu")
    source = ServerSource(demo / "base", *server, device="cpu", concurrency=3)
    texts = rows(1000)
    for text, states in zip(texts, source.row_states(texts), strict=True):
        wanted = teacher.row_states([text])[0]
        torch.testing.assert_close(states, wanted, rtol=1e-3, atol=1e-3 * float(wanted.std()))
    text = texts[2]
    positions = torch.tensor([0, 11, 39])
    argmax, logprob = source.own_predictions(text, positions)
    own = teacher.own_predictions(text, positions)
    assert torch.equal(argmax, own[0])
    torch.testing.assert_close(logprob, own[1], rtol=1e-3, atol=1e-3)
    assert [path.name for path in server[1].iterdir()] == ["server.log"]


def test_without_the_final_norm_the_servers_own_tokens_disagree(server, demo, monkeypatch):
    source = ServerSource(demo / "base", *server, device="cpu")
    monkeypatch.setattr(source, "final_norm", lambda hidden: hidden)
    with pytest.raises(UserError, match="own predictions"):
        source.row_states(rows(1000))


def test_a_row_that_does_not_fit_is_refused_at_once(server, demo):
    source = ServerSource(demo / "base", *server, device="cpu")
    with pytest.raises(UserError, match="max-model-len"):
        source.row_states([torch.ones(300, dtype=torch.long)])
