"""The proof that each layer runs at its own position, and that nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from build_tiny import TINY_NOISE, VOCABULARY, build

from graft.errors import UserError
from mtp.serving.probe_client import run_probe

K = 4


def runs_of(folder: Path, broken: Path, common: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": "plain", "checkpoint": folder, "num_speculative_tokens": None, **common},
        *(
            {"name": f"{runtime}{suffix}", "checkpoint": checkpoint, "num_speculative_tokens": K,
             "routing": runtime == "routed", **common}
            for suffix, checkpoint in (("", folder), (" nan", broken))
            for runtime in ("stock", "routed")
        ),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_runs(tiny: Path, tmp_path_factory: Any, vllm_python: Path) -> dict[str, Any]:
    """All five configurations of the tiny model, one after the other in one process."""
    broken = build(tmp_path_factory.mktemp("nan"), nan_layers=(1, 2, 3), **TINY_NOISE)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        for length in (5, 9, 20, 40, 3, 60, 17, 33)
    ]
    common = {"prompts": prompts, "max_tokens": 60, "dtype": "float32", "ignore_eos": True}
    return by_name(run_probe(vllm_python, runs_of(tiny, broken, common)))


@pytest.fixture(scope="module")
def demo_runs(demo: Path, tmp_path_factory: Any, vllm_python: Path) -> dict[str, Any]:
    """The same on the demo's grafted model, on prompts from its own traces."""
    from transformers import AutoTokenizer

    from mtp.nano.tokenizer import with_parsed_arguments

    grafted = demo / "grafted"
    broken = nan_twin(grafted, tmp_path_factory.mktemp("nan") / "twin")
    tokenizer = AutoTokenizer.from_pretrained(grafted)
    prompts = []
    for line in (demo / "traces.jsonl").read_text().splitlines()[:16]:
        row = json.loads(line)
        prompts.append(
            tokenizer.apply_chat_template(
                with_parsed_arguments(row["messages"][:4]),
                tools=row.get("tools"), add_generation_prompt=True,
                return_dict=False,
            )[-512:]
        )  # fmt: skip
    common = {"prompts": prompts, "max_tokens": 100}
    return by_name(run_probe(vllm_python, runs_of(grafted, broken, common)))


def nan_twin(folder: Path, out: Path) -> Path:
    """A copy whose MTP layers 1.. are NaN; shards without head tensors are linked."""
    from safetensors.torch import load_file, save_file

    out.mkdir()
    for path in folder.iterdir():
        tensors = load_file(path) if path.suffix == ".safetensors" else {}
        spoiled = [n for n in tensors if n.startswith("mtp.layers.") and n.split(".")[2] != "0"]
        if spoiled:
            tensors |= {n: torch.full_like(tensors[n], float("nan")) for n in spoiled}
            save_file(tensors, out / path.name, {"format": "pt"})
        else:
            (out / path.name).symlink_to(path.resolve())
    return out


def by_name(result: dict[str, Any]) -> dict[str, Any]:
    return {run["name"]: run for run in result["runs"]}


@pytest.fixture(params=["tiny_runs", "demo_runs"])
def runs(request: Any) -> dict[str, Any]:
    return request.getfixturevalue(request.param)


def test_speculation_changes_no_token(runs: dict[str, Any]) -> None:
    for name, run in runs.items():
        assert run["outputs"] == runs["plain"]["outputs"], name


def test_nan_in_later_layers_shows_who_runs_them(runs: dict[str, Any]) -> None:
    """Fails when the plugin is not loaded: then the routed runs equal the stock ones."""
    assert [runs[n]["routed_layers"] for n in ("stock", "routed", "routed nan")] == [0, K, K]
    stock, stock_nan = runs["stock"], runs["stock nan"]
    assert stock["accepted_per_position"] == stock_nan["accepted_per_position"]
    assert stock["num_drafts"] == stock_nan["num_drafts"]
    assert stock["accepted_per_position"][1] > 0
    first, *later = runs["routed nan"]["cumulative"]
    assert first > 0.2 and max(later) < 0.02
    assert runs["routed"]["cumulative"][1] > 0.2


def test_counters_agree_with_each_other(runs: dict[str, Any]) -> None:
    for name in ("stock", "routed"):
        run = runs[name]
        assert run["num_draft_tokens"] == K * run["num_drafts"]
        assert run["num_accepted_tokens"] == sum(run["accepted_per_position"])
        num_tokens = sum(map(len, run["outputs"]))
        # Each round yields its accepted tokens and one more; the last may pass the end.
        made = run["num_drafts"] + run["num_accepted_tokens"] + len(run["outputs"])
        assert num_tokens <= made <= num_tokens + K * len(run["outputs"])


def test_the_demo_measured_what_it_predicted(demo: Path) -> None:
    """Whether routing pays is up to the head (docs/notes.md): it must lose nothing."""
    served = json.loads((demo / "served.json").read_text())
    mean = {row["label"]: row["mean_accepted"] for row in served["rows"]}
    for label in ("BF16", "NVFP4 twin"):
        assert abs(mean[f"{label} routed"] - mean[f"{label} routed, predicted"]) <= 0.1
        assert mean[f"{label} routed"] > mean[f"{label} stock"] - 0.1
    for row in served["rows"]:
        assert row.get("same_tokens", served["num_prompts"]) == served["num_prompts"], row["label"]


def test_a_failing_engine_is_a_users_error_with_its_log(tmp_path: Path, vllm_python: Path) -> None:
    run = {"name": "none", "checkpoint": tmp_path, "prompts": [[1]], "max_tokens": 1,
           "num_speculative_tokens": None}  # fmt: skip
    with pytest.raises(UserError, match=r"exit status 1.*config"):
        run_probe(vllm_python, [run])


def test_a_missing_interpreter_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make vllm-env"):
        run_probe(tmp_path / "python", [])
