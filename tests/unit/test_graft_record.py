"""The manifest: enough to prove a graft, and to take it back."""

from __future__ import annotations

import base64
import hashlib
import zlib

import pytest
from tiny import BASES, write_base, write_tiny_head

from graft.errors import UserError
from graft.index import write_json
from graft.manifest import read_manifest
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.writer import write_graft


@pytest.mark.parametrize("name", BASES)
def test_the_manifest_holds_the_files_that_were_rewritten_as_they_were(tmp_path, name):
    base = write_base(tmp_path / "base", **BASES[name])
    plan = plan_graft(base, write_tiny_head(tmp_path / "head", base))
    write_graft(plan, tmp_path / "out")
    stored = read_manifest(tmp_path / "out")["base_files"]
    assert set(stored) == {"config.json", "hf_quant_config.json", "model.safetensors.index.json"}
    for file, entry in stored.items():
        if not (base / file).exists():
            assert entry is None
            continue
        content = zlib.decompress(base64.b64decode(entry["zlib_base64"]))
        assert content == (base / file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]


def test_every_base_shard_is_kept_reemitted_or_removed(tmp_path):
    for number, place in enumerate(["shard", "mixed", "standalone"]):
        base = write_base(tmp_path / f"base{number}", declared=1, head_layers=1, head_place=place)
        plan = plan_graft(base, write_tiny_head(tmp_path / f"head{number}", base))
        manifest = write_graft(plan, tmp_path / f"out{number}").manifest
        kept = {n for n, f in manifest["files"].items() if f["storage"] == "hard-link"}
        reemitted = set(manifest["changes"]["reemitted_shards"])
        removed = set(manifest["changes"]["removed_shards"])
        assert kept | reemitted | removed == set(Checkpoint(base).shards)
        assert (len(reemitted), len(removed)) == ((1, 0) if place == "mixed" else (0, 1))


def test_a_manifest_of_another_schema_is_named(tmp_path):
    base = write_base(tmp_path / "base")
    plan = plan_graft(base, write_tiny_head(tmp_path / "head", base))
    manifest = write_graft(plan, tmp_path / "out").manifest
    write_json(tmp_path / "out" / "graft.manifest.json", manifest | {"schema_version": 1})
    with pytest.raises(UserError, match=r"schema 2.*schema 1"):
        read_manifest(tmp_path / "out")
