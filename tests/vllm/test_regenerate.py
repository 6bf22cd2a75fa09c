"""`mtp data regenerate` against a real vLLM server of the demo's base."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from graft.errors import UserError
from mtp.data.conversation import Conversation, checked
from mtp.data.formats import recogniser
from mtp.data.mask import loss_mask, render_rows
from mtp.data.own_tokens import encode_rows
from mtp.data.regenerate import base_record, regenerate
from mtp.data.render import Renderer, load_tokenizer
from mtp.data.server import Server
from mtp.serving.probe import use_environment

START_SECONDS = 600


@pytest.fixture(scope="module")
def server(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of the base with the parsers that its template needs, ended after the tests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    use_environment(environment)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(demo / "base"),
        "--served-model-name", "base", "--port", str(port), "--host", "127.0.0.1",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048",
        "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_xml",
        "--reasoning-parser", "qwen3",
    ]  # fmt: skip
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
    client = Server(url=f"http://127.0.0.1:{port}/v1", num_tries=1, timeout_seconds=300)
    deadline = time.monotonic() + START_SECONDS
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1):
                    pass
                client.model()
                break
            except (OSError, UserError):
                time.sleep(1)
        yield client
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def regenerated(demo: Path, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(report, rows, path): six recorded conversations and one prompt, greedily replayed."""
    folder = tmp_path_factory.mktemp("regenerated")
    source = folder / "traces.jsonl"
    with (demo / "traces.jsonl").open(encoding="utf-8") as stream:
        lines = [next(stream) for _ in range(6)]
    lines.append(json.dumps({"prompt": "What does the module bisect do?"}) + "\n")
    source.write_text("".join(lines), encoding="utf-8")
    out = folder / "own.jsonl"
    report = regenerate(
        server,
        [source],
        out,
        sampling={"temperature": 0, "max_tokens": 256},
        base=base_record(demo / "base"),
        thinking="strip",  # with it, so small a base seldom comes to an end
        concurrency=4,
    )
    return report, [json.loads(line) for line in out.read_text().splitlines()], out, source


def test_conversations_are_replayed(regenerated: Any) -> None:
    report, rows, *_ = regenerated
    print(report.as_text())
    assert not report.failed and report.done == len(rows)
    assert report.done + sum(report.unusable.values()) == 7
    assert report.done >= 3 and report.turns >= report.done
    assert any(m.get("tool_calls") for row in rows for m in row["messages"])


def test_token_ids_are_those_of_the_answer(demo: Path, regenerated: Any) -> None:
    """The ids that the server sent decode to what the row says, the end of turn included."""
    tokenizer = load_tokenizer(demo / "base")
    for row in regenerated[1]:
        replies = [m for m in row["messages"] if m["role"] == "assistant"]
        for reply, turn in zip(replies, row["regenerated"]["turns"], strict=True):
            text = tokenizer.decode(turn["token_ids"])
            assert turn["num_prompt_tokens"] > 0 and turn["finish_reason"] in ("stop", "tool_calls")
            assert reply["content"] in text and reply.get("reasoning_content", "") in text
            for call in reply.get("tool_calls", []):
                assert f"<function={call['function']['name']}>" in text


def test_another_run_asks_for_nothing(demo: Path, server: Server, regenerated: Any) -> None:
    _, rows, out, source = regenerated
    again = regenerate(
        Server(url=server.url, num_tries=1),
        [source],
        out,
        sampling={"temperature": 0, "max_tokens": 256},
        base=base_record(demo / "base"),
        thinking="strip",  # with it, so small a base seldom comes to an end
    )
    assert again.done == 0 and again.resumed == len(rows)


def test_the_rows_are_training_data(demo: Path, regenerated: Any) -> None:
    """Read again and rendered, every reply is found behind the prompt that was served."""
    renderer, num_own = Renderer(load_tokenizer(demo / "base"), thinking="strip"), 0
    for row in regenerated[1]:
        name, conversation = recogniser().read(row)
        assert name == "openai-messages" and isinstance(conversation, Conversation)
        rendered = render_rows(checked(conversation), renderer)
        num_replies = sum(len(part.replies) for part in rendered)
        assert num_replies == len(row["regenerated"]["turns"]) and conversation.teacher == "base"
        for part, (ids, offsets, own) in zip(
            rendered, encode_rows(rendered, renderer), strict=True
        ):
            num_own += own
            if own == len(part.replies):
                generated = [t for turn in row["regenerated"]["turns"] for t in turn["token_ids"]]
                assert ids[loss_mask(offsets, part.replies)].tolist() == generated
    # So small a base also makes broken calls, which the parser mends: those say something else.
    assert num_own >= len(regenerated[1]) / 2
