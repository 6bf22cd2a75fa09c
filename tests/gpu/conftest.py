"""Tests that need a CUDA device, and all but the losses' vLLM; elsewhere they skip and say so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NEED_VLLM = ("test_model_runner_v2.py",)
sys.path[:0] = [str(HERE), str(HERE.parent / "vllm")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    spec = importlib.util.find_spec("vllm")
    # tests/vllm itself looks like a namespace package of that name.
    has_vllm = spec is not None and spec.origin is not None
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
            elif not has_vllm and Path(item.path).name in NEED_VLLM:
                item.add_marker(pytest.mark.skip(reason="no vllm"))


@pytest.fixture(scope="session")
def num_gpus() -> int:
    return torch.cuda.device_count()
