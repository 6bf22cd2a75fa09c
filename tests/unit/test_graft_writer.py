"""Writing: what comes out is what was planned, the base is never touched, a kill leaves no half."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import BASES, write_base, write_tiny_head

from graft import writer
from graft.errors import UserError
from graft.formats import FORMS
from graft.index import INDEX_NAME
from graft.manifest import file_digests, read_manifest
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.verify import verify_graft
from graft.writer import write_graft

HEAD_FORMS = FORMS[:3]  # what mtp train and mtp quantize write; the others: test_graft_forms.py


def contents(folder):
    return file_digests(folder, sorted(p.name for p in folder.iterdir()))


def graft(base, head, out, **keywords):
    plan = plan_graft(base, head, out=out, allow_mismatch=keywords.pop("allow_mismatch", False))
    return write_graft(plan, out, **keywords)


@pytest.mark.parametrize("name", BASES)
def test_every_layout_is_grafted_and_verified(tmp_path, name):
    base = write_base(tmp_path / "base", **BASES[name])
    before = contents(base)
    for form in HEAD_FORMS:
        if "dense" in name and form != "bf16-fused":
            continue  # no experts: one form only
        head = write_tiny_head(tmp_path / f"head-{form}", base, form=form)
        result = graft(base, head, tmp_path / f"out-{form}", tool="test 1")
        report = verify_graft(result.out, base)
        assert report.ok, report.as_text()
        assert [c.status for c in report.checks] == ["pass"] * 8
        assert (report.num_layers, report.form) == (4, form)
        opened = Checkpoint(result.out)
        for tensor in opened.head_names:
            assert opened.info(tensor).shard.name == "model_mtp.safetensors"
    assert contents(base) == before


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(BASES)), st.integers(1, 3), st.integers(2_000, 60_000), st.data())
def test_any_graft_verifies_and_twice_is_once(tmp_path_factory, name, layers, limit, data):
    folder = tmp_path_factory.mktemp("graft")
    forms = HEAD_FORMS[:1] if "dense" in name else HEAD_FORMS
    form = data.draw(st.sampled_from(forms))
    base = write_base(folder / "base", **BASES[name])
    head = write_tiny_head(folder / "head", base, num_layers=layers, form=form)
    once = write_graft(plan_graft(base, head, head_shard_bytes=limit), folder / "once")
    assert verify_graft(once.out, base).ok
    plan = plan_graft(once.out, head, allow_mismatch=True, head_shard_bytes=limit)
    assert not plan.added and not plan.dropped
    assert [c for c in plan.config_changes if "producer" not in c] == []
    twice = write_graft(plan, folder / "twice")
    left, right = contents(once.out), contents(twice.out)
    assert left | {"graft.manifest.json": ""} == right | {"graft.manifest.json": ""}
    other = data.draw(st.sampled_from(forms))
    again = write_tiny_head(folder / "other", base, num_layers=4, form=other)
    third = graft(twice.out, again, folder / "third", allow_mismatch=True)
    report = verify_graft(third.out, base)
    assert report.ok and report.form == other, report.as_text()


def test_stored_head_tensors_are_those_of_the_head_folder(tmp_path):
    base = write_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt")
    out = graft(base, head, tmp_path / "out").out
    with safe_open(out / "model_mtp.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    wanted, found = load_file(head / "mtp.safetensors"), load_file(out / "model_mtp.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor.float(), found[name].float())


def test_config_keeps_all_it_had_and_gains_only_the_count(tmp_path):
    base = write_base(tmp_path / "base")
    out = graft(base, write_tiny_head(tmp_path / "head", base), tmp_path / "out").out
    old, new = (json.loads((f / "config.json").read_text()) for f in (base, out))
    assert new["text_config"].pop("mtp_num_hidden_layers") == 4
    assert new == old  # in particular no num_nextn_predict_layers
    assert not (out / "hf_quant_config.json").exists()


def test_bug_B13_both_quantization_files_say_the_same(tmp_path):
    base = write_base(tmp_path / "base")
    head = write_tiny_head(
        tmp_path / "head", base, form="nvfp4-modelopt",
        quantization={"producer": {"name": "modelopt", "version": "0.47.0"}})  # fmt: skip
    out = graft(base, head, tmp_path / "out").out
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    file = json.loads((out / "hf_quant_config.json").read_text())
    assert block["ignore"] == file["quantization"]["exclude_modules"]
    assert block["quant_method"] == "modelopt" and block["quant_algo"] == "NVFP4"
    assert {"group_size", "kv_cache_quant_algo", "exclude_modules"} <= file["quantization"].keys()
    assert block["producer"] == file["producer"] == {"name": "modelopt", "version": "0.47.0"}


@pytest.mark.parametrize(("link", "storage"), [("auto", "hard-link"), ("copy", "copy")])
def test_kept_shards_are_linked_or_copied_and_the_manifest_says_so(tmp_path, link, storage):
    base = write_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base)
    result = graft(base, head, tmp_path / "out", link=link, tool="mtp-graft 9")
    manifest = read_manifest(result.out)
    assert manifest == result.manifest and manifest["tool"] == "mtp-graft 9"
    for shard in base.glob("model-*.safetensors"):
        assert manifest["files"][shard.name]["storage"] == storage
        assert shard.samefile(result.out / shard.name) is (link == "auto")
    assert manifest["files"]["model_mtp.safetensors"]["storage"] == "written"
    assert set(manifest["files"]) == {p.name for p in result.out.iterdir()} - {
        "graft.manifest.json"
    }
    assert storage in result.as_text() and str(head) in result.as_text()


def test_links_fall_back_to_copies_or_fail_when_demanded(tmp_path, monkeypatch):
    base = write_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base)

    def refuse(source, target, **keywords):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    result = graft(base, head, tmp_path / "out")
    assert verify_graft(result.out, base).ok
    assert "hard-link" not in {f["storage"] for f in result.manifest["files"].values()}
    with pytest.raises(UserError, match="--link auto, or --link copy"):
        graft(base, head, tmp_path / "hard", link="hard")
    assert not (tmp_path / "hard").exists()


def test_a_hub_snapshot_of_links_is_resolved(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    write_base(blobs)
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    head = write_tiny_head(tmp_path / "head", snapshot)
    out = graft(snapshot, head, tmp_path / "out").out
    assert not any(path.is_symlink() for path in out.iterdir())
    assert verify_graft(out, snapshot).ok


def test_bug_E5_a_base_that_changes_after_planning_fails_the_graft(tmp_path):
    base = write_base(tmp_path / "base")
    plan = plan_graft(base, write_tiny_head(tmp_path / "head", base))
    os.utime(base / "model-00001-of-00003.safetensors")
    with pytest.raises(UserError, match="when the graft was planned"):
        write_graft(plan, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "head"]


def test_bug_A6_a_failure_between_the_steps_leaves_nothing(tmp_path, monkeypatch):
    base = write_base(tmp_path / "base")
    plan = plan_graft(base, write_tiny_head(tmp_path / "head", base))
    for step in ("share_files", "write_shard", "index_of", "graft_manifest"):
        with monkeypatch.context() as patch:

            def fail(*arguments, **keywords):
                raise RuntimeError("injected")

            patch.setattr(writer, step, fail)
            with pytest.raises(RuntimeError, match="injected"):
                write_graft(plan, tmp_path / "out")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "head"]


def test_bug_E1_the_index_covers_every_tensor_of_every_shard(tmp_path):
    base = write_base(tmp_path / "base", shard_name="model-mtp-of-{:05d}.safetensors")
    out = graft(base, write_tiny_head(tmp_path / "head", base), tmp_path / "out").out
    index = json.loads((out / INDEX_NAME).read_text())
    assert set(index["weight_map"]) == set(Checkpoint(out).names)
    total = sum(info.nbytes for info in Checkpoint(out).infos())
    assert index["metadata"]["total_size"] == total


def test_kills_at_random_moments_leave_no_output_or_a_whole_one(tmp_path):
    base = write_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt")
    plan, out, before = plan_graft(base, head), tmp_path / "out", contents(base)
    start = time.monotonic()
    write_graft(plan, out)
    duration = time.monotonic() - start
    moments, interrupted = random.Random(0), 0
    for attempt in range(24):
        existed = out.exists()
        if existed and attempt % 2:
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
        child = os.fork()
        if not child:
            try:
                write_graft(plan, out, overwrite=True)
            finally:
                os._exit(0)
        time.sleep(moments.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any(p.name.startswith(".out.staging") for p in tmp_path.iterdir())
        if out.exists():
            assert verify_graft(out, base).ok
        elif existed and not attempt % 2:
            raise AssertionError("an existing output was lost")
    assert interrupted >= 5, "the kills came too late to prove anything"
    assert contents(base) == before
    write_graft(plan, out, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "head", "out"]
