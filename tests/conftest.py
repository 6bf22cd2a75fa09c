"""Fixtures shared by the tests: small random bases that transformers itself built."""

from pathlib import Path

import pytest
from random_bases import save_random_base, save_random_dense_base


@pytest.fixture(scope="session")
def random_dense_base(tmp_path_factory) -> Path:
    return save_random_dense_base(tmp_path_factory.mktemp("base") / "dense")


@pytest.fixture(scope="session")
def random_base(tmp_path_factory) -> Path:
    return save_random_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="session")
def few_words_base(tmp_path_factory) -> Path:
    """Eight words only, so that random drafts are right often enough to test acceptance."""
    return save_random_base(tmp_path_factory.mktemp("base") / "few", vocab_size=8, seed=3)
