"""The command line: quick help, stable exit codes, one line for a user's mistake."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data_helpers import chat, make_base, write_jsonl
from typer.testing import CliRunner

import mtp
from graft.errors import UserError
from mtp.cli import app
from mtp.teacher import pick_device

COMMANDS = [
    (), ("data",), ("data", "prepare"), ("nano",), ("nano", "traces"), ("nano", "code"),
    ("nano", "base"), ("train",), ("eval",), ("quantize",), ("graft",), ("verify",), ("inspect",),
    ("ungraft",), ("plot",), ("head",), ("head", "extract"), ("probe",), ("release",),
    ("release", "build"),
]  # fmt: skip


GROUPS = [("data",), ("head",), ("nano",), ("release",)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mtp.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    if command and len(command[-1]) > 3 and command not in GROUPS:
        assert "Example" in result.output


def test_help_loads_nothing_heavy_and_answers_quickly():
    script = (
        "import sys; sys.argv = ['mtp', '--help']\n"
        "import mtp.cli\n"
        "try: mtp.cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'modelopt'} & set(sys.modules)))"
    )

    def seconds(code: str) -> tuple[float, str]:
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return time.perf_counter() - started, done.stdout

    # Beside what typer itself needs, in turns, so that a busy machine slows both.
    runs = [(seconds("import typer, rich.table"), seconds(script)) for _ in range(5)]
    assert runs[0][1][1].splitlines()[-1] == "[]"
    assert min(help_[0] for _, help_ in runs) < 3 * min(alone[0] for alone, _ in runs)


def test_version():
    assert run("--version").stdout == f"mtp-graft {mtp.__version__}\n"


def test_wrong_usage_is_2():
    assert run("graft").returncode == 2
    assert run("nonsense").returncode == 2
    assert run("nano", "traces", "--out", "never.jsonl", "--conversations", -1).returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--base", "nowhere", "--data", "nowhere"),
        ("eval", "--base", "nowhere", "--data", "nowhere"),
        ("quantize", "--base", "nowhere", "--data", "nowhere"),
        ("quantize", "--dequantize", "--out", "out"),
        ("quantize", "--trunk", "--base", "nowhere", "--out", "out"),
        ("graft", "--base", "nowhere", "--out", "out"),
        ("verify", "nowhere"),
        ("inspect", "nowhere"),
        ("ungraft", "nowhere", "--out", "out"),
        ("head", "extract", "nowhere", "--out", "out"),
        ("data", "prepare", "--base", "nowhere", "--source", "nothing", "--out", "out"),
        ("nano", "base", "--traces", "nothing", "--code", "nowhere", "--out", "out"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_missing_input_is_one_line_and_1(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    line = result.stderr.strip()
    assert line.startswith("mtp: expected ") and "; found " in line and "\n" not in line
    assert not list(Path(tmp_path).iterdir())  # nothing half-written


@pytest.mark.parametrize(
    "option",
    [
        ("--thinking", "maybe"), ("--max-length", "0"), ("--held-out-percent", "100"),
        ("--max-skip", "2"), ("--near-duplicates", "some"), ("--scan", "all"), ("--mix", "code"),
    ],
    ids=lambda option: option[0],
)  # fmt: skip
def test_a_value_that_no_input_could_make_right_is_2(option, tmp_path):
    """Where the inputs are as they should be, so that nothing else is wrong."""
    base = make_base(tmp_path / "base", "qwen35")
    source = write_jsonl(tmp_path / "a.jsonl", [chat(1)])
    inputs = ("data", "prepare", "--base", base, "--source", source, "--out", tmp_path / "out")
    error = CliRunner().invoke(app, [*map(str, inputs), *option]).exception
    assert isinstance(error, UserError) and error.exit_code == 2 and option[1] in error.found


@pytest.mark.parametrize(("name", "code"), [("gpu", 2), ("meta:x", 2), ("cuda:99", 1)])
def test_an_unknown_device_is_2_and_a_missing_one_1(name, code):
    with pytest.raises(UserError, match=f"a device of this machine; found '{name}'") as found:
        pick_device(name)
    assert found.value.exit_code == code


def test_the_base_as_output_is_refused(random_base, tmp_path):
    head = tmp_path / "head"
    for out in (random_base, random_base / "inside"):
        result = run("graft", "--base", random_base, "--head", head, "--out", out)
        assert result.returncode == 1
        assert "apart from the input" in result.stderr


def test_sigterm_removes_what_is_half_made(tmp_path):
    script = (
        "import tempfile, time, mtp.cli\n"
        "def command():\n"
        f"    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "mtp.cli.app = command\n"
        "mtp.cli.main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert list(tmp_path.iterdir())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("after", "said"), [(1.0, True), (2.0, False), (2.5, False)])
def test_training_that_lost_acceptance_says_so(after, said, tmp_path, monkeypatch):
    """The best head of a run may still be worse than where it began."""

    def metrics(mean):
        return {"mean_accepted": mean, "cumulative": [0.5], "acc_len": 1 + mean, "num_drafts": 9}

    summary = {"steps": 3, "tokens": 9, "seconds": 1.0, "best_step": 2}
    summary |= {"before": metrics(2.0), "after": metrics(after)}
    monkeypatch.setattr("mtp.train.train", lambda *_, **__: summary)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "--base", "base", "--data", "data", "--out", "out"])
    assert ("before training more was accepted" in " ".join(result.output.split())) == said
    assert "2.000" in result.output
