"""Regeneration against a server that is rude: busy, slow, half, refusing, killed in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from data_helpers import ROOT, read_row, write_jsonl

from graft.errors import UserError
from mtp.data.regenerate import regenerate
from mtp.data.server import RequestRefusedError, Server, ServerGoneError

SCHEMA = {"type": "function", "function": {"name": "grep", "parameters": {"type": "object"}}}
SAMPLING = {"temperature": 0.7, "max_tokens": 50}


def answer(content="", calls=(), finish="stop", **fields):
    tool_calls = [
        {"id": f"new-{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls, **fields}
    choice = {"index": 0, "message": message, "finish_reason": finish, "token_ids": [5, 6, 7]}
    return {"choices": [choice], "prompt_token_ids": [1, 2]}


class Fake:
    """An OpenAI-compatible server; `reply(request)` gives a dict or (status, headers, body)."""

    def __init__(self):
        self.requests, self.reply, self.lock = [], lambda request: answer("ok"), threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send(200, {}, json.dumps({"data": [{"id": "base", "max_model_len": 99}]}))

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.requests.append(request)
                made = fake.reply(request)
                self.send(*made) if isinstance(made, tuple) else self.send(200, {}, made)

            def send(self, status, headers, body):
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                for name, value in {"Content-Length": len(data), **headers}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def fake():
    server = Fake()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def client(fake):
    waits = []
    server = Server(url=fake.url, num_tries=4, timeout_seconds=5, sleep=waits.append)
    return server, waits


def run(client, source, out, **options):
    defaults = {"sampling": SAMPLING, "base": {"revision": "r1"}, "concurrency": 4}
    report = regenerate(client[0], [source], out, **(defaults | options))
    return report, [json.loads(line) for line in out.read_text().splitlines()]


def chats(path, count):
    rows = [{"id": f"c{n}", "license": "MIT", "messages": [
        {"role": "user", "content": f"Question {n}?"}, {"role": "assistant", "content": "old"},
        {"role": "user", "content": "And then?"}, {"role": "assistant", "content": "older"},
    ]} for n in range(count)]  # fmt: skip
    return write_jsonl(path, rows)


def trace(path):
    def call(number, pattern):
        function = {"name": "grep", "arguments": {"pattern": pattern, "n": 1}}
        return {"id": f"old-{number}", "type": "function", "function": function}

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find it."},
        {"role": "assistant", "content": "", "tool_calls": [call(0, "a"), call(1, "b")]},
        {"role": "tool", "tool_call_id": "old-1", "content": "result of b"},
        {"role": "tool", "tool_call_id": "old-0", "content": "result of a"},
        {"role": "assistant", "content": "", "tool_calls": [call(2, "c")]},
        {"role": "tool", "tool_call_id": "old-2", "content": "result of c"},
        {"role": "assistant", "content": "Found."},
    ]
    return write_jsonl(path, [{"id": "t", "messages": messages, "tools": [SCHEMA]}])


def test_a_missing_source_is_found_before_the_server_is_asked(tmp_path):
    waits = []
    nobody = Server(url="http://127.0.0.1:9/v1", num_tries=4, sleep=waits.append)
    with pytest.raises(UserError, match="nothing at"):
        regenerate(nobody, [tmp_path / "none"], tmp_path / "out.jsonl", sampling=SAMPLING, base={})
    assert not waits and not list(tmp_path.iterdir())


def test_every_assistant_turn_is_the_servers(fake, client, tmp_path):
    fake.reply = lambda request: answer(f"new {len(request['messages'])}", reasoning="Hm.")
    report, rows = run(client, chats(tmp_path / "a.jsonl", 3), tmp_path / "out.jsonl")
    assert report.done == 3 and report.turns == 6 and report.ended == {"whole": 3}
    for row in rows:
        assert [m["content"] for m in row["messages"][1::2]] == ["new 1", "new 3"]
        assert row["messages"][1]["reasoning_content"] == "Hm."
        assert row["license"] == "MIT" and row["model"] == "base"
        assert [turn["token_ids"] for turn in row["regenerated"]["turns"]] == [[5, 6, 7]] * 2
        name, conversation = read_row(row)
        assert name == "openai-messages" and conversation.teacher == "base"
    second = next(r for r in fake.requests if len(r["messages"]) == 3)
    assert second["messages"][1] == {
        "role": "assistant", "content": "new 1", "reasoning_content": "Hm."
    }  # fmt: skip
    assert second["temperature"] == 0.7 and second["chat_template_kwargs"] == {
        "enable_thinking": True
    }
    log = json.loads((tmp_path / "out.jsonl.log").read_text().splitlines()[0])
    assert log["sampling"] == SAMPLING and log["base"] == {"revision": "r1"}
    assert log["model"] == "base" and log["thinking"] == "keep"


def scripted(*answers):
    """The n-th assistant turn of a conversation is the n-th answer."""
    return lambda request: answers[sum(m["role"] == "assistant" for m in request["messages"])]


AB = [("grep", '{"n": 1, "pattern": "a"}'), ("grep", '{"pattern":"b","n":1}')]


def test_recorded_results_follow_matching_calls(fake, client, tmp_path):
    fake.reply = scripted(
        answer(calls=AB, finish="tool_calls"),
        answer(calls=[("grep", '{"pattern": "c", "n": 1}')], finish="tool_calls"),
        answer("It is there."),
    )
    report, (row,) = run(client, trace(tmp_path / "a.jsonl"), tmp_path / "out.jsonl")
    assert report.ended == {"whole": 1}
    results = [(m["tool_call_id"], m["content"]) for m in row["messages"] if m["role"] == "tool"]
    assert results == [("new-1", "result of b"), ("new-0", "result of a"), ("new-0", "result of c")]
    assert row["messages"][-1]["content"] == "It is there." and row["tools"] == [SCHEMA]
    assert fake.requests[0]["tools"] == [SCHEMA]


@pytest.mark.parametrize(
    ("second", "ended"),
    [
        (answer(calls=[("grep", '{"pattern": "x", "n": 1}')]), "a call that the trace did not"),
        (answer(calls=[("grep", '{"pattern": "c", "n": true}')]), "a call that the trace did not"),
        (answer(calls=[("find", '{"pattern": "c", "n": 1}')]), "a call that the trace did not"),
        (answer(calls=[*AB]), "a call that the trace did not"),
        (answer("I know it."), "an answer where the trace made a call"),
    ],
    ids=["other arguments", "1 is not true", "other name", "more calls", "no call"],
)
def test_the_first_other_call_ends_the_conversation(fake, client, tmp_path, second, ended):
    fake.reply = scripted(answer(calls=AB), second, answer("End."))
    report, (row,) = run(client, trace(tmp_path / "a.jsonl"), tmp_path / "out.jsonl")
    assert ended in next(iter(report.ended))
    assert len(row["messages"]) == 6 and len(fake.requests) == 2
    assert row["messages"][-1]["role"] == "assistant"
    assert (
        row["messages"][-1].get("tool_calls", []) == second["choices"][0]["message"]["tool_calls"]
    )
    assert read_row(row)[1].messages


def test_a_call_in_plain_text_must_be_the_same(fake, client, tmp_path):
    said = "I look.\n```mswea_bash_command\nls\n```"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": said},
                {"role": "user", "content": "<output>a.py</output>"},
                {"role": "assistant", "content": "Done."}]  # fmt: skip
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    fake.reply = scripted(answer(said), answer("Yes."))
    report, (row,) = run(client, source, tmp_path / "same.jsonl")
    assert report.ended == {"whole": 1} and len(row["messages"]) == 4
    fake.reply = scripted(answer(said.replace("ls", "pwd")), answer("Yes."))
    report, (row,) = run(client, source, tmp_path / "other.jsonl")
    assert "in its text" in next(iter(report.ended)) and len(row["messages"]) == 2


def test_prompts_are_answered_one_after_another(fake, client, tmp_path):
    fake.reply = lambda request: answer(f"reply to {request['messages'][-1]['content']}")
    source = write_jsonl(tmp_path / "a.jsonl", [{"question_id": 1, "turns": ["one", "two"]}])
    _, (row,) = run(client, source, tmp_path / "out.jsonl")
    said = [m["content"] for m in row["messages"]]
    assert said == ["one", "reply to one", "two", "reply to two"]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer("half of", finish="length"), "cut off"),
        (answer("  "), "empty"),
        (answer("", reasoning="Hm."), "thinking without an answer"),
        (answer("<tool_call>\n<function=grep>"), "tool-call-parser"),
        (answer(calls=[("grep", "{broken")]), "no JSON object"),
    ],
)
def test_unfit_answers_are_never_learned_from(fake, client, tmp_path, reply, reason):
    source = chats(tmp_path / "a.jsonl", 1)
    fake.reply = lambda request: reply
    report, rows = run(client, source, tmp_path / "out.jsonl")
    assert rows == [] and reason in next(iter(report.unusable))
    fake.reply = scripted(answer("good"), reply)
    report, (row,) = run(client, source, tmp_path / "later.jsonl")
    assert reason in next(iter(report.ended))
    assert [m["content"] for m in row["messages"][1:]] == ["good"]


def test_thinking_without_a_reasoning_parser_is_split_off(fake, client, tmp_path):
    fake.reply = lambda request: answer("Hm.\n</think>\n\nYes.")
    _, (row,) = run(client, chats(tmp_path / "a.jsonl", 1), tmp_path / "out.jsonl")
    assert row["messages"][1] == {
        "role": "assistant", "content": "Yes.", "reasoning_content": "Hm."
    }  # fmt: skip


def failing(times, failure):
    left = [times]

    def reply(request):
        if left[0]:
            left[0] -= 1
            return failure
        return answer("ok")

    return reply


@pytest.mark.parametrize(
    "failure",
    [
        (429, {"Retry-After": "7"}, "{}"),
        (503, {}, "busy"),
        (200, {"Content-Length": 9999}, '{"choices"'),
        (200, {}, '{"choices": [{"mess'),
        (200, {}, {"choices": []}),
        answer("no end", finish=None),
    ],
    ids=["429", "503", "cut connection", "cut JSON", "no choice", "no end"],
)
def test_what_may_pass_is_tried_again(fake, client, failure):
    server, waits = client
    fake.reply = failing(3, failure)
    request = {"messages": []}
    assert server.complete(request)["message"]["content"] == "ok"
    assert len(fake.requests) == 4 and len(waits) == 3
    if isinstance(failure, tuple) and failure[0] == 429:
        assert waits[0] >= 3.5
    fake.reply = failing(4, failure)
    with pytest.raises(ServerGoneError, match="4 tries"):
        server.complete(request)


def test_waits_double_and_are_spread(fake, client):
    server, waits = client
    fake.reply = failing(9, (500, {}, "x"))
    with pytest.raises(ServerGoneError, match="HTTP 500: x"):
        server.complete({})
    assert all(0.5 * 2**n <= wait <= 1.5 * 2**n for n, wait in enumerate(waits))


def test_a_late_answer_is_tried_again(fake):
    slow = iter([0.6])

    def reply(request):
        time.sleep(next(slow, 0))
        return answer("ok")

    fake.reply = reply
    server = Server(url=fake.url, timeout_seconds=0.2, sleep=lambda _: None)
    assert server.complete({})["message"]["content"] == "ok" and len(fake.requests) == 2


def test_a_refusal_is_not_tried_again_and_is_remembered(fake, client, tmp_path):
    too_long = (400, {}, {"error": {"message": "too many tokens"}})
    fake.reply = lambda request: too_long
    with pytest.raises(RequestRefusedError, match="HTTP 400: too many tokens"):
        client[0].complete({})
    assert len(fake.requests) == 1
    source, out = chats(tmp_path / "a.jsonl", 2), tmp_path / "out.jsonl"
    report, _ = run(client, source, out)
    assert report.unusable == {"HTTP 400: too many tokens": 2}
    run(client, source, out)
    assert len(fake.requests) == 3


def test_a_command_that_kept_no_answer_fails(fake, tmp_path):
    """A server without a tool parser refuses every row, and refusals are remembered."""
    command = [
        sys.executable, "-m", "mtp.cli", "data", "regenerate", "--url", fake.url,
        "--data", chats(tmp_path / "a.jsonl", 2), "--out", tmp_path / "out.jsonl",
    ]  # fmt: skip
    fake.reply = lambda request: (400, {}, {"error": {"message": "no parser"}})
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "2 HTTP 400: no parser" in done.stdout
    assert "--overwrite" in done.stderr
    fake.reply = lambda request: answer("ok")
    done = subprocess.run([*command, "--overwrite"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "written   2" in done.stdout
    assert subprocess.run(command, capture_output=True, cwd=ROOT).returncode == 0  # nothing left


def test_a_dead_server_ends_the_run_and_the_next_one_goes_on(fake, client, tmp_path):
    source, out = chats(tmp_path / "a.jsonl", 40), tmp_path / "out.jsonl"
    fake.reply = lambda r: answer("ok") if "Question 0" in str(r) else (503, {}, "")
    with pytest.raises(UserError, match="none to the last 20 conversations"):
        run(client, source, out)
    fake.reply, fake.requests[:] = lambda request: answer("ok"), []
    report, rows = run(client, source, out)
    assert report.resumed == 1 and report.done == 39 and len(fake.requests) == 78
    assert sorted(row["id"] for row in rows) == sorted(f"c{n}" for n in range(40))
    fake.http.shutdown()
    fake.http.server_close()
    with pytest.raises(UserError, match="OpenAI-compatible server"):
        run(client, source, out)


def test_half_a_line_is_asked_for_again(fake, client, tmp_path):
    source, out = chats(tmp_path / "a.jsonl", 3), tmp_path / "out.jsonl"
    _, whole = run(client, source, out)
    out.write_bytes(out.read_bytes()[:-20])
    fake.requests.clear()
    report, rows = run(client, source, out)
    assert report.resumed == 2 and report.done == 1 and len(fake.requests) == 2
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in whole)


def test_other_settings_are_refused(fake, client, tmp_path):
    source, out = chats(tmp_path / "a.jsonl", 1), tmp_path / "out.jsonl"
    run(client, source, out)
    with pytest.raises(UserError, match=r'sampling: \{"temperature": 0.7'):
        run(client, source, out, sampling={"temperature": 1.0})
    assert run(client, source, out, sampling={"temperature": 1.0}, overwrite=True)[0].done == 1
    other = write_jsonl(tmp_path / "other.jsonl", [{"a": 1}])
    with pytest.raises(UserError, match="without such a run's log"):
        run(client, source, other)


def test_killed_at_any_moment_and_resumed(fake, tmp_path):
    """kill -9 in a process of its own, several times; every row is there once at the end."""
    source, out = chats(tmp_path / "a.jsonl", 60), tmp_path / "out.jsonl"

    def reply(request):
        time.sleep(0.02)
        return answer("ok " * 300)

    fake.reply = reply
    code = (
        "from mtp.data.regenerate import regenerate\nfrom mtp.data.server import Server\n"
        f"regenerate(Server(url={fake.url!r}), [{str(source)!r}], {str(out)!r},"
        f" sampling={SAMPLING!r}, base={{}}, concurrency=2)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    kills = 0
    for wanted in (5, 20, 35, None):
        process = subprocess.Popen([sys.executable, "-c", code], env=environment)
        while process.poll() is None:
            lines = out.read_bytes().count(b"\n") if out.exists() else 0
            if wanted is not None and lines >= wanted:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        process.wait()
    assert kills == 3 and process.returncode == 0
    ids = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert sorted(ids) == sorted(f"c{n}" for n in range(60))
    assert len(fake.requests) <= 120 + 3 * 2 * 4  # what was under way when killed
