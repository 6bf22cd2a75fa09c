"""The scripted agent: its tools work, its recordings are real and repeatable."""

from __future__ import annotations

import json
import random
import shutil
import sys

import pytest

from mtp.nano import agent, tasks_edit, tasks_read
from mtp.nano.agent import record_conversation, record_traces
from mtp.nano.session import Session, parse_module, signature
from mtp.nano.stdlib import stdlib_root
from mtp.nano.workspace import MOST_CHARACTERS, MOST_LINES, MOST_MATCHES, Workspace

NUM_RECORDED = 20


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Conversations with the names of their tasks and the workspace each one left."""
    scratch = tmp_path_factory.mktemp("recorded")
    roots = [scratch / str(index) for index in range(NUM_RECORDED)]
    return [(*record_conversation(i, 3, root), root) for i, root in enumerate(roots)]


def calls_of(row):
    """(name, arguments, result) of each call, results found by id."""
    results = {m["tool_call_id"]: m["content"] for m in row["messages"] if m["role"] == "tool"}
    for message in row["messages"]:
        for call in message.get("tool_calls", []):
            function = call["function"]
            yield function["name"], json.loads(function["arguments"]), results[call["id"]]


def test_every_edit_really_happened(recorded):
    """Undoing a conversation's edits gives the original files, or the broken one it repaired."""
    num_edits = 0
    for row, kinds, root in recorded:
        edits = [a for name, a, out in calls_of(row) if name == "edit_file" and "error" not in out]
        num_edits += len(edits)
        texts = {p.name: p.read_text(encoding="utf-8") for p in root.glob("*.py")}
        final = dict(texts)
        for arguments in reversed(edits):
            text = texts[arguments["path"]]
            assert text.count(arguments["new"]) >= 1
            texts[arguments["path"]] = text.replace(arguments["new"], arguments["old"], 1)
        for name, text in texts.items():
            original = (stdlib_root() / name).read_text(encoding="utf-8")
            if final[name] != original:
                compile(final[name], name, "exec")
            if text != original:
                assert "repair_module" in kinds and final[name] == original
                with pytest.raises(SyntaxError):
                    compile(text, name, "exec")
    assert num_edits >= 5


def test_reads_and_searches_show_the_files(recorded):
    """Calls that change nothing give the same result again on a file that was never edited."""
    for row, _, root in recorded:
        calls = list(calls_of(row))
        touched = {a["path"] for name, a, _ in calls if name == "edit_file"}
        for name, arguments, result in calls:
            if name in ("read_file", "grep") and arguments.get("path") not in {None, *touched}:
                assert Workspace(root).call(name, arguments) == result


def test_messages_are_openai_messages(recorded):
    for row, _, _ in recorded:
        assert row["schema_version"] == 1 and row["licence"] == "PSF-2.0"
        names = {tool["function"]["name"] for tool in row["tools"]}
        assert [m["role"] for m in row["messages"][:2]] == ["system", "user"]
        assert row["messages"][-1]["role"] == "assistant"
        waiting: list[str] = []
        for message in row["messages"]:
            if message["role"] == "tool":
                assert message["tool_call_id"] == waiting.pop(0)
                continue
            assert not waiting
            waiting = [call["id"] for call in message.get("tool_calls", [])]
        assert {name for name, _, _ in calls_of(row)} <= names


def test_variety(recorded):
    rows = [row for row, _, _ in recorded]
    assert len({kind for _, kinds, _ in recorded for kind in kinds}) >= 6
    thinking = [any("reasoning_content" in m for m in row["messages"]) for row in rows]
    assert any(thinking) and not all(thinking)
    assert any(len(m.get("tool_calls", [])) > 1 for row in rows for m in row["messages"])


class LowRandom(random.Random):
    """Takes every branch that a chance opens."""

    def random(self):
        return 0.0


@pytest.mark.parametrize(
    "task, module, outputs",
    [
        (tasks_read.locate, "shlex", ["def "]),
        (tasks_read.count_classes, "queue", ["class Queue:", "5"]),
        (tasks_read.summarise, "textwrap", ['"""', '1\t"""Text wrapping']),
        (tasks_read.search_again, "textwrap", ["no matches", "textwrap.py ("]),
        (tasks_edit.add_docstring, "cmd", ["occurs 0 times", "edited cmd.py", "cmd.py compiles"]),
        (tasks_edit.rename_local, "heapq", ["edited heapq.py", "heapq.py compiles"]),
        (tasks_edit.fix_snippet, "textwrap", ["Error: ", "[exit code 1]", "(text"]),
        (tasks_edit.call_wrongly, "heapq", ["TypeError: ", "[exit code 1]"]),
        (tasks_edit.repair_module, "heapq", ["SyntaxError", "edited heapq.py", "compiles"]),
    ],
)
def test_each_task_sees_what_it_should(tmp_path, task, module, outputs):
    shutil.copyfile(stdlib_root() / f"{module}.py", tmp_path / f"{module}.py")
    session = Session(Workspace(tmp_path), LowRandom(1), thinks=True)
    assert task(session, parse_module(stdlib_root() / f"{module}.py"))
    row = session.record("x", source="s", licence="l")
    seen = "\n".join(out for _, _, out in calls_of(row))
    for output in outputs:
        assert output in seen
    assert all(m["reasoning_content"] for m in row["messages"] if m["role"] == "assistant")


def test_a_task_that_does_not_apply_asks_nothing(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    session = Session(Workspace(tmp_path), random.Random(0), thinks=True)
    module = parse_module(tmp_path / "empty.py")
    assert not any(task(session, module) for task in agent.TASKS)
    assert session.messages == []


def test_recordings_name_nothing_of_this_machine(recorded):
    text = json.dumps([row for row, _, _ in recorded])
    assert str(recorded[0][2].parent) not in text
    assert str(stdlib_root()) not in text


def test_same_seed_same_file(tmp_path):
    paths = [tmp_path / name for name in ("one", "two", "other")]
    counts = record_traces(paths[0], num_conversations=5, seed=1, num_workers=1)
    record_traces(paths[1], num_conversations=5, seed=1, num_workers=3)
    record_traces(paths[2], num_conversations=5, seed=2)
    one, two, other = (path.read_bytes() for path in paths)
    assert one == two != other
    assert len(one.splitlines()) == 5 <= sum(counts.values())


def test_a_failed_recording_leaves_nothing(tmp_path, monkeypatch):
    def fail(index, seed, root):
        raise RuntimeError("no")

    monkeypatch.setattr(agent, "record_conversation", fail)
    with pytest.raises(RuntimeError):
        record_traces(tmp_path / "traces.jsonl", num_conversations=2)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def workspace(tmp_path):
    (tmp_path / "long.py").write_text("".join(f"x{n} = {n}\n" for n in range(100)))
    return Workspace(tmp_path)


def test_long_outputs_are_cut_and_say_so(workspace):
    shown = workspace.read_file("long.py").splitlines()
    assert shown[-1] == f"[cut: lines {MOST_LINES + 1}-100 are not shown]"
    assert len(shown) == MOST_LINES + 1
    assert workspace.grep("x").splitlines()[-1] == f"[cut: {100 - MOST_MATCHES} more matches]"
    printed = workspace.run_python("print('a' * 5000)")
    assert printed == "a" * MOST_CHARACTERS + f"\n[cut: {5000 - MOST_CHARACTERS} more characters]"


def test_tools_answer_mistakes_with_text(workspace):
    assert workspace.read_file("missing.py") == "error: no such file: missing.py"
    assert workspace.read_file("long.py", 500, 510) == "error: long.py has 100 lines"
    assert workspace.grep("(").startswith("error: bad pattern")
    assert workspace.edit_file("long.py", "= ", "= 1") == (
        "error: the old text occurs 100 times in long.py, expected exactly once"
    )
    assert workspace.run_python("import sys; sys.exit(3)") == "[no output]\n[exit code 3]"


def test_run_python_sees_the_workspace_and_not_the_environment(workspace, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_USER", "1")
    output = workspace.run_python("import long, os; print(long.__file__, dict(os.environ))")
    assert output.startswith("/workspace/long.py") and "SECRET" not in output
    assert workspace.run_python("print(sum({'a', 'b'} == {'b', 'a'} for _ in 'x'))") == "1"


def test_run_python_stops_what_does_not_end(workspace, monkeypatch):
    monkeypatch.setattr("mtp.nano.workspace.RUN_TIMEOUT_SECONDS", 0.5)
    assert workspace.run_python("while True: pass") == "error: stopped after 0.5 seconds"


def test_signature_spans_lines():
    assert signature(["def f(a,", "      b=(1, 2)):", "    pass"]) == "def f(a, b=(1, 2)):"
    assert signature(["    def g(self) -> int:", "        pass"]) == "def g(self) -> int:"


def test_tasks_only_name_modules_of_the_standard_library():
    assert len([n for n in agent.MODULE_NAMES if n in sys.stdlib_module_names]) > 60


@pytest.mark.parametrize("task", [tasks_read.locate, tasks_edit.call_wrongly,
                                  tasks_edit.add_docstring])  # fmt: skip
@pytest.mark.parametrize("source", ["def  spaced(a):\n    pass\n", "def spaced (a):\n    pass\n"])
def test_a_function_that_a_search_would_miss_is_not_asked_about(tmp_path, task, source):
    (tmp_path / "odd.py").write_text(source)
    session = Session(Workspace(tmp_path), random.Random(0), thinks=True)
    module = parse_module(tmp_path / "odd.py")
    assert len(module.functions) == 1
    assert not task(session, module)
    assert session.messages == []
