"""What is in prepared data: lengths, categories, the supervised and the tool-calling share.

Read from the rows themselves, so it also holds for a folder whose report was lost. The columns
are read without the tokens, a chunk at a time for the masks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from graft.errors import UserError
from mtp.data.store import SCHEMA_VERSION, SPLITS, load_prepared

PERCENTILES = (0, 25, 50, 75, 90, 99, 100)
_ROWS_AT_ONCE = 512


def statistics(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(the statistics as JSON values, the row lengths of each split, [N] int64).

    Raises:
        UserError: not a prepared folder.
    """
    data = load_prepared(Path(folder))
    result: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    lengths = {}
    for split in SPLITS:
        result[split], lengths[split] = _of_split(data[split])
    return result, lengths


def as_text(result: dict[str, Any]) -> str:
    """For a terminal: for each split and category one line, then the lengths."""
    lines = [f"{'':22}{'rows':>9}{'tokens':>12}{'supervised':>12}{'calling':>9}"]
    for split in SPLITS:
        for name, counts in result[split]["categories"].items():
            lines.append(f"{split + ' ' + name:22}" + _line(counts))
        lines.append(f"{split:22}" + _line(result[split]))
    lines.append("")
    lines.append(f"{'tokens a row':22}" + "".join(f"{f'{p}%':>8}" for p in PERCENTILES))
    for split in SPLITS:
        found = result[split]["length_percentiles"].values()
        lines.append(f"{split:22}" + "".join(f"{value:8}" for value in found))
    lines.append("calling: share of the supervised replies that make a tool call")
    return "\n".join(lines)


def plot_lengths(lengths: dict[str, np.ndarray], out: Path) -> None:
    """A histogram of row lengths, one colour a split.

    Raises:
        UserError: matplotlib is missing, or a kind of image that it does not write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        action = "run `pip install matplotlib`"
        raise UserError("matplotlib for --plot", "none", action) from error
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    longest = max((int(found.max(initial=1)) for found in lengths.values()), default=1)
    for split, found in lengths.items():
        axes.hist(found, bins=np.linspace(0, longest, 51).tolist(), label=split.replace("_", " "))
    axes.set(xlabel="tokens a row", ylabel="rows", yscale="log")
    axes.legend()
    try:
        figure.savefig(out, dpi=150)
    except (ValueError, OSError) as error:
        raise UserError(
            "an image to write, such as lengths.png", str(error), "fix --plot"
        ) from error


def _of_split(rows: Any) -> tuple[dict[str, Any], np.ndarray]:
    lengths, supervised, replies, calling = (np.zeros(len(rows), dtype=np.int64) for _ in range(4))
    categories = np.asarray(rows["category"], dtype=str)
    is_recorded = "num_replies" in rows.column_names
    arrow = rows.with_format("arrow")
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        chunk = arrow[first : first + _ROWS_AT_ONCE].combine_chunks()
        place = slice(first, first + chunk.num_rows)
        masks = chunk.column("loss_mask").combine_chunks()
        sizes = np.diff(masks.offsets.to_numpy())
        flat = masks.flatten().to_numpy(zero_copy_only=False)
        before = np.concatenate([[0], np.cumsum(flat)])
        ends = np.cumsum(sizes)
        lengths[place], supervised[place] = sizes, before[ends] - before[ends - sizes]
        if is_recorded:
            replies[place] = chunk.column("num_replies").to_numpy()
            calling[place] = chunk.column("num_replies_with_calls").to_numpy()

    def counts(chosen: np.ndarray) -> dict[str, Any]:
        num_replies, tokens = int(replies[chosen].sum()), int(lengths[chosen].sum())
        return {
            "rows": int(chosen.sum()),
            "tokens": tokens,
            "supervised_tokens": int(supervised[chosen].sum()),
            "supervised_share": round(int(supervised[chosen].sum()) / max(tokens, 1), 4),
            "replies": num_replies,
            "tool_call_share": round(int(calling[chosen].sum()) / num_replies, 4)
            if num_replies
            else None,
        }

    found = np.percentile(lengths, PERCENTILES).round() if len(rows) else np.empty(0)
    return {
        **counts(np.ones(len(rows), dtype=bool)),
        "categories": {str(name): counts(categories == name) for name in np.unique(categories)},
        "length_percentiles": dict(zip(map(str, PERCENTILES), map(int, found), strict=False)),
    }, lengths


def _line(counts: dict[str, Any]) -> str:
    share = counts["tool_call_share"]
    calling = "-" if share is None else f"{share:.1%}"
    supervised = f"{counts['supervised_share']:.1%}"
    return f"{counts['rows']:9}{counts['tokens']:12}{supervised:>12}{calling:>9}"
