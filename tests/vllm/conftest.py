"""Tests inside vLLM's own environment: `.venv-vllm/bin/python -m pytest tests/vllm`.

Without vLLM they skip and say so; with MTP_REQUIRE_VLLM=1 that is a failure, as is a missing demo.
The demo's folder is MTP_DEMO, or build/nano where it exists.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp.serving.probe import use_environment

# One thread: these models are so small that threads only wait for each other, and they wait by
# spinning, since torch may have been imported before OMP_WAIT_POLICY is set here.
use_environment(os.environ)
torch.set_num_threads(1)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

HERE = Path(__file__).parent
REQUIRED = os.environ.get("MTP_REQUIRE_VLLM") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    spec = importlib.util.find_spec("vllm")
    # This folder itself looks like a namespace package of that name.
    if spec is not None and spec.origin is not None:
        return
    if REQUIRED:
        pytest.exit("MTP_REQUIRE_VLLM=1, and this Python has no vllm: run `make vllm-env`", 1)
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason="no vllm in this environment"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base with a 4-layer head."""
    from build_tiny import TINY_NOISE, build

    return build(tmp_path_factory.mktemp("tiny"), **TINY_NOISE)


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo's folder, finished."""
    # Absolute: servers are started in other folders.
    folder = Path(os.environ.get("MTP_DEMO", HERE.parents[1] / "build" / "nano")).absolute()
    if not (folder / "served.json").is_file():
        message = f"no finished demo at {folder}: run `make demo`, or set MTP_DEMO"
        pytest.fail(message) if REQUIRED else pytest.skip(message)
    return folder


@pytest.fixture
def engine() -> Any:
    """A function that starts an in-process engine; all are shut down after the test."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    started: list[Any] = []

    def start(folder: Path, num_speculative_tokens: int, **options: Any) -> Any:
        llm = LLM(
            str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            speculative_config={
                "method": "mtp",
                "num_speculative_tokens": num_speculative_tokens,
            },
            **({"max_model_len": 256} | options),
        )
        started.append(llm)
        return llm

    yield start
    started.clear()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return Path(sys.executable)
