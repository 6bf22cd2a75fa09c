"""Ungraft: the base back to the byte, or a clear word on what is missing. Never a wrong base."""

from __future__ import annotations

import errno
import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny import BASES, write_base, write_tiny_head
from tiny_quantized import QUANTIZED
from typer.testing import CliRunner

from graft.errors import UserError
from graft.index import write_json
from graft.plan import plan_graft
from graft.ungraft import plan_ungraft, write_ungraft
from graft.verify import verify_graft
from graft.writer import write_graft
from mtp.cli import app

ONLY_ADDED = sorted(name for name, row in BASES.items() if not row.get("head_layers"))
DROPPED = sorted(name for name, row in BASES.items() if row.get("head_layers"))
FORMS = ("bf16-fused", "bf16-per-expert", "nvfp4-modelopt")


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def grafted(tmp_path, row, form="bf16-fused", link="auto", **options):
    base = write_base(tmp_path / "base", **row)
    head = write_tiny_head(tmp_path / "head", base, form=form, num_layers=2)
    plan = plan_graft(base, head, **options)
    return base, write_graft(plan, tmp_path / "grafted", link=link).out


def ungraft(tmp_path, checkpoint, base=None, **options):
    return write_ungraft(plan_ungraft(checkpoint, base), tmp_path / "back", **options)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(ONLY_ADDED), st.sampled_from(FORMS),
    st.sampled_from(["auto", "copy"]), st.sampled_from(["auto", "copy"]),
    st.text("abc_", min_size=1, max_size=5), st.binary(max_size=40),
)  # fmt: skip
def test_graft_then_ungraft_is_the_identity_where_only_added(
    tmp_path_factory, name, form, graft_link, ungraft_link, extra, extra_bytes
):
    tmp_path = tmp_path_factory.mktemp("identity")
    row = BASES[name]
    if row.get("dense"):
        form = "bf16-fused"
    base = write_base(tmp_path / "base", **row)
    (base / f"{extra}.txt").write_bytes(extra_bytes)  # any bytes, not only JSON or text
    config = (base / "config.json").read_text()
    (base / "config.json").write_text(config.replace('": ', '" : ') + "\n\n")  # odd spacing
    before = content(base)
    head = write_tiny_head(tmp_path / "head", base, form=form, num_layers=2)
    out = write_graft(plan_graft(base, head), tmp_path / "grafted", link=graft_link).out
    result = ungraft(tmp_path, out, link=ungraft_link)
    assert content(result.out) == before == content(base)
    assert result.as_dict()["complete"] and not result.plan.left_behind
    as_bad_as_it_was = "declared" in row or not row.get("index", True)
    report = verify_graft(result.out)
    assert report.ok != as_bad_as_it_was, report.failures


@pytest.mark.parametrize("name", QUANTIZED)
def test_both_quantization_configs_come_back_to_the_byte(tmp_path, name):
    base = write_base(tmp_path / "base", quantized=name)
    before = content(base)
    head = write_tiny_head(tmp_path / "head", base, form="nvfp4-modelopt", num_layers=2)
    out = write_graft(plan_graft(base, head), tmp_path / "grafted").out
    assert (out / "config.json").read_bytes() != before["config.json"]
    assert content(ungraft(tmp_path, out).out) == before


@pytest.mark.parametrize("name", DROPPED)
def test_where_a_head_was_dropped_the_base_is_needed_and_then_all_comes_back(tmp_path, name):
    base, out = grafted(tmp_path, BASES[name])
    before = content(base)
    with pytest.raises(UserError, match="--base, since this graft did not only add"):
        plan_ungraft(out)
    result = ungraft(tmp_path, out, base)
    assert content(result.out) == before == content(base)
    assert verify_graft(result.out).ok == ("standalone" not in str(BASES[name]))


def test_text_only_needs_the_base(tmp_path):
    base = write_base(tmp_path / "base")
    (base / "preprocessor_config.json").write_text("{}")
    head = write_tiny_head(tmp_path / "head", base)
    out = write_graft(plan_graft(base, head, text_only=True), tmp_path / "grafted").out
    with pytest.raises(UserError, match=r"preprocessor_config\.json"):
        plan_ungraft(out)
    assert content(ungraft(tmp_path, out, base).out) == content(base)


def test_what_graft_left_out_is_named_and_comes_back_with_the_base(tmp_path):
    base = write_base(tmp_path / "base")
    (base / ".gitattributes").write_text("*.safetensors lfs\n")
    (base / "SHA256SUMS").write_text("00  config.json\n")
    (base / "original" / "deep").mkdir(parents=True)
    (base / "original" / "deep" / "params.json").write_text("{}")
    save_file({"other": torch.ones(3)}, base / "unindexed.safetensors")
    head = write_tiny_head(tmp_path / "head", base)
    out = write_graft(plan_graft(base, head), tmp_path / "grafted").out
    left_out = [".gitattributes", "SHA256SUMS", "original", "unindexed.safetensors"]
    without = ungraft(tmp_path, out)
    assert list(without.plan.not_restored) == left_out and not without.as_dict()["complete"]
    assert "not restored: original" in without.as_text()
    whole = ungraft(tmp_path, out, base, overwrite=True)
    assert content(whole.out) == content(base) and whole.as_dict()["complete"]


@pytest.mark.parametrize("name", ["config.json", "README.md", "model_mtp.safetensors"])
@pytest.mark.parametrize("change", ["edit", "remove"])
def test_files_changed_since_the_graft_are_refused_by_name(tmp_path, name, change):
    _, out = grafted(tmp_path, {}, link="copy")
    if change == "edit":
        (out / name).write_bytes((out / name).read_bytes() + b" ")
    else:
        (out / name).unlink()
    with pytest.raises(UserError, match=f"{name} (has changed|is gone)"):
        plan_ungraft(out)
    assert not (tmp_path / "back").exists()


def test_a_file_put_there_later_is_left_behind_and_said(tmp_path):
    base, out = grafted(tmp_path, {})
    (out / "notes.txt").write_text("mine")
    result = ungraft(tmp_path, out)
    assert result.plan.left_behind == ("notes.txt",) and "notes.txt" in result.as_text()
    assert content(result.out) == content(base)


@pytest.mark.parametrize("damage", ["another base", "edited shard", "edited config", "no folder"])
def test_only_the_base_that_was_grafted_onto_is_believed(tmp_path, damage):
    row = BASES["one-layer head among trunk tensors"]
    base, out = grafted(tmp_path, row)
    given = tmp_path / "given"
    if damage == "another base":
        write_base(given, **row, seed=7)
    elif damage != "no folder":
        shutil.copytree(base, given)
        name = "config.json" if "config" in damage else "model-00003-of-00003.safetensors"
        data = bytearray((given / name).read_bytes())
        data[-1] ^= 1
        (given / name).write_bytes(data)
    with pytest.raises(UserError, match=r"differ; give the right|correct --base"):
        plan_ungraft(out, given)
    assert plan_ungraft(out, base).from_base  # control: the right one


def test_links_are_shared_and_nothing_is_written_through_them(tmp_path):
    base, out = grafted(tmp_path, BASES["declared but absent head"])
    result = ungraft(tmp_path, out)
    shards = sorted(base.glob("*.safetensors"))
    assert all(shard.samefile(result.out / shard.name) for shard in shards)
    assert set(result.storage.values()) == {"hard-link", "copy"}
    assert not (base / "config.json").samefile(result.out / "config.json")
    assert "do not edit in place" in result.as_text()


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch, moment):
    _, out = grafted(tmp_path, {})
    plan = plan_ungraft(out)
    if moment == "before":
        monkeypatch.setattr("graft.place.free_bytes", lambda folder: 10)
    else:

        def full(source, target):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("graft.ungraft.copy_file", full)
    before = content(tmp_path)
    with pytest.raises(UserError, match="free space"):
        write_ungraft(plan, tmp_path / "back", link="copy")
    assert content(tmp_path) == before


def test_a_folder_without_a_manifest_or_with_anothers_is_refused(tmp_path):
    base, out = grafted(tmp_path, {}, link="copy")
    with pytest.raises(UserError, match=r"no graft\.manifest\.json"):
        plan_ungraft(base)
    for folder in (out, base):
        with pytest.raises(UserError, match="apart from the input"):
            write_ungraft(plan_ungraft(out, base), folder, overwrite=True)


def lie(manifest, how):
    files, old = manifest["files"], manifest["base_files"]
    if how == "path outside":
        files["../escaped.txt"] = files.pop("README.md")
    elif how == "base file outside":
        old["../escaped.txt"] = old["config.json"]
    elif how == "base file over a shard":
        old["model-00001-of-00003.safetensors"] = old["config.json"]
    elif how == "base file of another name":
        old["run_me.py"] = old["config.json"]
    elif how == "left out outside":
        manifest["changes"]["left_out"] = ["../../etc"]
    elif how == "no base files":
        del manifest["base_files"]
    elif how == "no storage":
        del files["README.md"]["storage"]
    elif how == "other bytes":
        old["config.json"]["sha256"] = "0" * 64
    elif how == "not base64":
        old["config.json"]["zlib_base64"] = "?"


@pytest.mark.parametrize(
    "how",
    ["path outside", "base file outside", "base file over a shard",
     "base file of another name", "left out outside",
     "no base files", "no storage", "other bytes", "not base64"],
)  # fmt: skip
def test_a_manifest_that_lies_writes_nothing(tmp_path, how):
    _, out = grafted(tmp_path, {})
    manifest = json.loads((out / "graft.manifest.json").read_text())
    lie(manifest, how)
    write_json(out / "graft.manifest.json", manifest)
    (tmp_path / "escaped.txt").write_text("# a tiny base\n")
    before = content(tmp_path)
    with pytest.raises(UserError, match=r"graft\.manifest\.json"):
        ungraft(tmp_path, out)
    assert content(tmp_path) == before


def test_the_command(tmp_path):
    base, out = grafted(tmp_path, BASES["one-layer head in its own shard"])
    arguments = ["ungraft", str(out), "--out", str(tmp_path / "back")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError) and not (tmp_path / "back").exists()
    result = CliRunner().invoke(app, [*arguments, "--base", str(base), "--json"])
    found = json.loads(result.output)
    assert result.exit_code == 0 and found["complete"] and found["schema_version"] == 1
    assert found["from_base"] == ["model-00004-of-00004.safetensors"]


def test_a_base_is_not_replaced_by_less_than_itself(tmp_path):
    base, checkpoint = grafted(tmp_path, BASES[ONLY_ADDED[0]])
    write_ungraft(plan_ungraft(checkpoint), base, overwrite=True)  # the same: allowed
    (base / "notes.gguf").write_bytes(b"mine")
    checkpoint = write_graft(
        plan_graft(base, tmp_path / "head"), tmp_path / "grafted", overwrite=True
    ).out
    before = content(base)
    with pytest.raises(UserError, match=r"notes\.gguf.*--overwrite would lose"):
        write_ungraft(plan_ungraft(checkpoint), base, overwrite=True)
    assert content(base) == before
