"""Mean accepted of every served head, with ratios: `python summarize.py WORK/served OUT.json`.

Mean accepted is accepted / drafts of K, from vLLM's counters. Intervals (95 %) and ratios are by
prompt: bootstraps over conversations, in which two heads always meet on the same prompts. A last
step cut off at the end of a request counts what was kept of it; vLLM's counters keep all of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

NUM_RESAMPLES = 4000
OPPONENT = "speculators-post"
RECIPE = ("routed-kl", "routed")  # ours as it stands: beside it losses, teachers, NVFP4 experts
Key = tuple[str, str]  # head and runtime
Kind = tuple[str, float, str]  # base, temperature and how drafts are drawn


def read_tables(served: Path) -> dict[Kind, dict[Key, dict[str, Any]]]:
    """Runs by what two of them must share to be compared, then by head and runtime.

    Greedy decoding has one table: its drafts are the most likely tokens either way, and a head's
    engine with greedy drafts comes first.
    """
    tables: dict[Kind, dict[Key, dict[str, Any]]] = {}
    for path in sorted(served.glob("*/result.json")):
        result = json.loads(path.read_text())
        for run in result["runs"]:
            drafts = result["drafts"] if run["temperature"] else "greedy"
            table = tables.setdefault((result["base"], run["temperature"], drafts), {})
            table.setdefault((result["head"], result["runtime"]), run)
    return dict(sorted(tables.items()))


def bootstrap(conversations: list[str]) -> np.ndarray:
    """[R, prompts] how often each prompt is drawn when conversations are, with replacement."""
    names, place = np.unique(conversations, return_inverse=True)
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), NUM_RESAMPLES)
    return drawn[:, place]


def interval(samples: np.ndarray) -> list[float]:
    return [float(q) for q in np.quantile(samples, (0.025, 0.975))]


def summarize(table: dict[Key, dict[str, Any]], times: np.ndarray) -> dict[str, Any]:
    """Each head's row, and its ratios to the opponents that the table holds."""
    means, samples, rows = {}, {}, {}
    for key, run in table.items():
        drafts, accepted = np.array(run["drafts"]), np.array(run["accepted"])
        means[key] = accepted.sum() / drafts.sum()
        samples[key] = (times @ accepted) / (times @ drafts)
        counters = run["counters"]
        positions = np.array(counters["accepted_per_position"]) / counters["num_drafts"]
        rows[key] = {
            "head": key[0], "runtime": key[1], "num_drafts": counters["num_drafts"],
            "mean_accepted": float(positions.sum()), "cumulative": positions.tolist(),
            "by_prompt": float(means[key]), "interval": interval(samples[key]), "ratios": {},
        }  # fmt: skip
    for label, key in opponents(means).items():
        for other, row in rows.items():
            if other != key:
                row["ratios"][label] = {
                    "to": key[0], "mean": float(means[other] / means[key]),
                    "interval": interval(samples[other] / samples[key]),
                }  # fmt: skip
    return {"rows": [rows[key] for key in sorted(rows, key=lambda k: -means[k])]}


def opponents(means: dict[Key, float]) -> dict[str, Key]:
    """Our recipe, speculators' head as vLLM wants it, its best one, our best on a stock vLLM."""

    def best(wanted: Any) -> Key | None:
        return max((key for key in means if wanted(key)), key=means.__getitem__, default=None)

    found = {
        RECIPE[0]: RECIPE if RECIPE in means else None,
        OPPONENT: best(lambda key: key[0] == OPPONENT),
        "best speculators": best(lambda key: key[0].startswith("speculators")),
        "our best stock": best(
            lambda key: key[1] == "stock" and not key[0].startswith("speculators")
        ),
    }
    return {label: key for label, key in found.items() if key}


def show(name: str, summary: dict[str, Any]) -> None:
    """Print a table in Markdown."""
    labels = list(dict.fromkeys(r for row in summary["rows"] for r in row["ratios"]))
    head = ["head", "runtime", "drafts", "mean accepted", "positions, cumulative",
            "by prompt [95 %]", *(f"/ {label}" for label in labels)]  # fmt: skip
    print(f"\n{name}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in summary["rows"]:
        low, high = row["interval"]
        cells = [
            row["head"], row["runtime"], str(row["num_drafts"]), f"{row['mean_accepted']:.3f}",
            " ".join(f"{p:.3f}" for p in row["cumulative"]),
            f"{row['by_prompt']:.3f} [{low:.3f}, {high:.3f}]",
        ]  # fmt: skip
        for label in labels:
            if ratio := row["ratios"].get(label):
                low, high = ratio["interval"]
                cells.append(f"{ratio['mean']:.3f} [{low:.3f}, {high:.3f}]")
            else:
                cells.append("")
        print(f"| {' | '.join(cells)} |")


def main(served: Path, out: Path) -> None:
    plan = json.loads((served / "plan.json").read_text())
    times = bootstrap(plan["conversations"])
    report: dict[str, Any] = {
        "schema_version": 1, "num_prompts": len(plan["prompts"]),
        "num_conversations": len(set(plan["conversations"])), "tables": [],
    }  # fmt: skip
    for (base, temperature, drafts), table in read_tables(served).items():
        summary = summarize(table, times)
        kind = {"base": base, "temperature": temperature, "drafts": drafts}
        report["tables"].append(kind | summary)
        show(f"Served on {base}, temperature {temperature}, {drafts} drafts", summary)
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
