"""How vLLM's process is called, with a stand-in for its interpreter."""

import sys
from pathlib import Path

import pytest

from graft.errors import UserError
from mtp.serving.probe_client import run_probe

STAND_IN = """#!{python}
import json, sys
request = json.load(open(sys.argv[3]))
runs = [{{**run, "num_speculative_tokens": None}} for run in request["runs"]]
json.dump({{"vllm_version": "0", "runs": runs}}, open(sys.argv[4], "w"))
sys.exit({status})
"""


def stand_in(folder: Path, status: int = 0) -> Path:
    path = folder / "python-with-vllm"
    path.write_text(STAND_IN.format(python=sys.executable, status=status))
    path.chmod(0o755)
    return path


def test_relative_paths_mean_the_callers_folder(tmp_path, monkeypatch):
    stand_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = run_probe(Path("./python-with-vllm"), [{"name": "a", "checkpoint": "build/grafted"}])
    assert result["runs"][0]["checkpoint"] == str(tmp_path / "build" / "grafted")


def test_an_interpreter_is_found_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(stand_in(tmp_path).parent))
    result = run_probe(Path("python-with-vllm"), [{"name": "a", "checkpoint": tmp_path}])
    assert result["vllm_version"] == "0"


def test_a_failing_process_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="exit status 3"):
        run_probe(stand_in(tmp_path, status=3), [{"name": "a", "checkpoint": tmp_path}])


def test_a_missing_interpreter_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="make vllm-env"):
        run_probe(tmp_path / "nothing", [])


@pytest.mark.parametrize(
    ("module", "advice"), [("vllm", "--vllm-python"), ("mtp", "--no-deps"), ("x", "known")]
)
def test_what_the_environment_lacks_is_named_with_what_brings_it(tmp_path, module, advice):
    python = tmp_path / "python-without-it"
    complaint = f"raise ModuleNotFoundError(\"No module named '{module}'\")"
    python.write_text(f"#!{sys.executable}\n{complaint}\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=f"No module named '{module}'.*{advice}"):
        run_probe(python, [{"name": "a", "checkpoint": tmp_path}])
