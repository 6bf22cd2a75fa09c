"""What users can get wrong, as one exception that says what to do next.

The command line prints it as one line on stderr and exits with 1, or with 2 when a value of the
command is wrong whatever the files hold. Anything else that escapes is a bug of ours and keeps its
traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A broken input or a refused request.

    Args:
        expected: what was expected, as a noun phrase ("a shard of 5 tensors").
        found: what was found instead ("a file of 0 bytes: base/model-2.safetensors").
        action: what to do next, as an imperative ("download the shard again").
    """

    exit_code = 1

    def __init__(self, expected: str, found: str, action: str) -> None:
        super().__init__(expected, found, action)
        self.expected, self.found, self.action = expected, found, action

    def __str__(self) -> str:
        line = f"expected {self.expected}; found {self.found}; {self.action}"
        return " ".join(line.split())


class UsageError(UserError):
    """A value of an option that no input could make right."""

    exit_code = 2
