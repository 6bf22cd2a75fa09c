"""Reading the JSON that `--report` wrote, of this or an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft.errors import UserError


def read_report(path: Path, *any_of: str) -> dict[str, Any]:
    """Read a report.

    Args:
        path: the JSON file.
        any_of: keys of which the report must hold at least one.

    Raises:
        UserError: no such file, not JSON, or a report of another kind.
    """
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError("a report in JSON", f"{path}: {error}", "write it with --report") from error
    if not isinstance(report, dict) or not any(key in report for key in any_of):
        raise UserError(
            f"a report with {' or '.join(any_of)}", f"{path} without", "name the right report"
        )
    return report
