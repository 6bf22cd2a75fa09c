"""--dry-run: the plan, foreseen to the byte, and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tiny import BASES, write_base, write_tiny_head

from graft.plan import plan_graft
from graft.plan_report import report_plan
from graft.writer import write_graft
from mtp.cli.options import parse_size


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mtp.cli", "graft", *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("link", ["auto", "copy"])
def test_what_is_foreseen_is_what_comes(tmp_path, name, link):
    base = write_base(tmp_path / "base", **BASES[name])
    plan = plan_graft(base, write_tiny_head(tmp_path / "head", base))
    report = report_plan(plan, tmp_path / "out", link)
    result = write_graft(plan, tmp_path / "out", link=link)
    files = result.manifest["files"]
    shared = [n for n, f in files.items() if f["storage"] == "hard-link"]
    written = sum(f["bytes"] for f in files.values()) - report.bytes_shared
    written += (result.out / "graft.manifest.json").stat().st_size
    assert report.bytes_shared == sum(files[n]["bytes"] for n in shared)
    assert written <= report.bytes_to_write <= written + 150_000
    actions = {name: action for name, action, _ in report.shards}
    assert {n for n, a in actions.items() if a == "hard-link"} == set(shared)
    assert {n for n, a in actions.items() if a == "re-emit"} == set(
        result.manifest["changes"]["reemitted_shards"]
    )
    assert set(actions) - {n for n, a in actions.items() if a == "leave out"} == {
        n for n in files if n.endswith(".safetensors")
    }


def test_dry_run_prints_and_writes_nothing(tmp_path):
    base = write_base(tmp_path / "base", declared=1, head_layers=1, head_place="mixed")
    (base / "old.bin").write_text("pickle")
    head = write_tiny_head(tmp_path / "head", base)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    common = ["--base", base, "--head", head, "--out", tmp_path / "deep" / "out", "--dry-run"]
    text = run(*common)
    assert text.returncode == 0, text.stderr
    for piece in ("nothing written", "re-emit", "hard-link", "write ", "to write", "free:",
                  "mtp_num_hidden_layers: 1 -> 4", "left out: old.bin"):  # fmt: skip
        assert piece in text.stdout, piece
    printed = run(*common, "--json", "--head-shard-size", "20KB", "--text-only")
    plan = json.loads(printed.stdout)
    assert plan["schema_version"] == 1 and plan["dry_run"] is True
    assert len(plan["added"]) + len(plan["replaced"]) == 64 and plan["num_kept"] > 50
    assert plan["text_only"]["saved_bytes"] > 0
    heads = [s for s in plan["shards"] if s["name"].startswith("model_mtp")]
    assert len(heads) > 2 and all(s["bytes"] <= 20_000 for s in heads)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_an_existing_out_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "out").mkdir()
    result = run("--base", tmp_path / "none", "--out", tmp_path / "out", "--dry-run")
    assert result.returncode == 1 and "--overwrite" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5_000_000_000), ("5G", 5_000_000_000), ("5gib", 5 * 2**30), ("1.5 MB", 1_500_000),
     ("500MiB", 500 * 2**20), ("4096", 4096), ("10B", 10)],
)  # fmt: skip
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-5GB", "0", "five"])
def test_what_is_no_size_is_refused(text):
    result = run("--base", "b", "--out", "o", f"--head-shard-size={text}")
    assert result.returncode == 2 and "is not a size" in result.stderr
