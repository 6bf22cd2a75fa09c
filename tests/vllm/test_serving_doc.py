"""The flags that docs/serving.md tells people to use exist in the installed vLLM."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

DOC = Path(__file__).parents[2] / "docs" / "serving.md"


def serve_arguments(text: str) -> list[str]:
    """The arguments of the container's `vllm serve` command."""
    found = re.search(r"exec vllm serve (.*?)'\n```", text, re.S)
    assert found, "no `exec vllm serve` command in a code block"
    return shlex.split(found[1].replace("\\\n", " "))


def parse(arguments: list[str]) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)


def test_vllm_parses_the_container_command() -> None:
    parsed = parse(serve_arguments(DOC.read_text()))
    assert parsed.speculative_config == {"method": "mtp", "num_speculative_tokens": 4}
    assert parsed.moe_backend == "humming"


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(SystemExit):
        parse([*serve_arguments(DOC.read_text()), "--no-such-flag", "1"])


def test_every_flag_of_the_table_is_in_a_command() -> None:
    text = DOC.read_text()
    rows = [row for row in text.splitlines() if row.startswith("| `") and "not needed" not in row]
    flags = re.findall(r"`(--[a-z-]+|[A-Z0-9_]{8,})", " ".join(row.split("|")[1] for row in rows))
    command = re.search(r"docker run .*?```", text, re.S)
    assert command and len(flags) > 10
    assert [flag for flag in flags if flag not in command[0]] == []
