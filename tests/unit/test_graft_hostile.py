"""Files made to mislead, hang or blow up the reader: each is one clear error, and quick.

Numbers in names and configs, nesting, links, pipes and terminal codes. The lies of a header about
its own bytes are in test_graft_reader.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import BASES, write_base, write_tiny_head

from graft.errors import UserError
from graft.formats import quantization_blocks
from graft.index import INDEX_NAME, MAX_HEADER_BYTES, read_header, read_json
from graft.inspect import inspect_checkpoint
from graft.layout import count_head_layers, fuse_experts, head_tensor_shapes
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.ungraft import plan_ungraft
from graft.verify import verify_graft
from graft.writer import write_graft


def header_file(path, header, size=8):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))
    return path


def entry(shape, nbytes, dtype="F16"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}


HEADERS = {
    "elements, wrapping to 8 bytes": {"a": entry([2**62, 8, 2], 8)},
    "elements, hidden by a zero": {"a": entry([2**40, 2**40, 0], 0)},
    "elements in one size": {"a": entry([0, 2**70], 0)},
    "dtype that is a list": {"a": entry([4], 8, ["F16"])},
    "NaN for a size": b'{"a":{"dtype":"F16","shape":[NaN],"data_offsets":[0,8]}}',
    "true for a size": b'{"a":{"dtype":"F16","shape":[4,true],"data_offsets":[0,8]}}',
    "number of 5000 digits": b'{"a":' + b"9" * 5000 + b"}",
    "offsets backwards": {"a": {"dtype": "F16", "shape": [4], "data_offsets": [8, 0]}},
    "offsets past the file": {"a": {"dtype": "F16", "shape": [4], "data_offsets": [800, 808]}},
    "nesting": b"[" * 200_000,
    "not UTF-8": b'{"\xff\xfe": {}}',
    "terminal codes in a name": {"\x1b[2Jmtp.fc": entry([4], 8)},
    "half a character in a name": b'{"\\ud800": {"dtype":"F16","shape":[4],"data_offsets":[0,8]}}',
    "a name of nothing": {"": entry([4], 8)},
    "metadata that is no text": {"__metadata__": {"format": 1}, "a": entry([4], 8)},
}


@pytest.mark.parametrize("lie", HEADERS)
def test_bug_E4_headers_that_lie(tmp_path, lie):
    path = header_file(tmp_path / "lie.safetensors", HEADERS[lie], 8 if "zero" not in lie else 0)
    with pytest.raises(UserError, match=r"lie\.safetensors") as caught:
        read_header(path)
    assert "\x1b" not in str(caught.value) and str(caught.value).isprintable()
    if "name" not in lie:  # safetensors agrees; odd names it would read
        with pytest.raises((SafetensorError, TypeError)):
            load_file(path)


def test_the_same_header_without_a_lie_is_read(tmp_path):
    header = read_header(header_file(tmp_path / "true.safetensors", {"a": entry([4], 8)}))
    assert header["a"].shape == (4,)


def test_bug_E4_a_header_longer_than_the_format_allows(tmp_path):
    path = tmp_path / "long.safetensors"
    with path.open("wb") as file:  # a sparse file: no disk is filled
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}")
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(UserError, match="header would take 100000001"):
        read_header(path)


def test_a_duplicate_among_very_many_keys_is_found_at_once(tmp_path):
    names = [f'"k{n}":0' for n in range(100_000)]
    text = "{" + ",".join([*names, names[-1]]) + "}"
    path = header_file(tmp_path / "x.safetensors", text.encode())
    with pytest.raises(UserError, match="k99999' appears twice"):
        read_header(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", "nested"),
        (b"[" * 100_000, "JSON"),
        (b'{"a": "\xff"}', "JSON"),
        (b'{"a": "\\ud800"}', "surrogates"),
        (b'{"a": ["\\uDFFF x"]}', "surrogates"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"", "JSON"),
    ],
)
def test_json_that_could_not_be_written_again_is_refused(tmp_path, text, found):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=found) as caught:
        read_json(tmp_path / "config.json")
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 5), ("architectures", [1]), ("quantization_config", []),
        ("text_config", "x"), ("layer_types", [None]), ("num_experts", "4"), ("num_experts", -1),
        ("tie_word_embeddings", "yes"), ("mtp_num_hidden_layers", True), ("model_type", 1),
        ("decoder_sparse_step", 1.5),
    ],
)  # fmt: skip
def test_config_values_of_another_kind_are_named(tmp_path, key, value):
    base = write_base(tmp_path / "base", nested=False, prefix="model.")
    edit_json(base / "config.json", lambda config: config.update({key: value}))
    with pytest.raises(UserError, match=key):
        Checkpoint(base)


def edit_json(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    "shard",
    ["..\\x.safetensors", "a\0.safetensors", "a\n.safetensors", "x" * 300 + ".safetensors", "..",
     "sub/x.safetensors", 5, None],
)  # fmt: skip
def test_shard_names_that_are_no_file_names(tmp_path, shard):
    base = write_base(tmp_path / "base")
    edit_json(base / INDEX_NAME, lambda v: v["weight_map"].update({"lm_head.weight": shard}))
    with pytest.raises(UserError, match="plain file names"):
        Checkpoint(base)


def test_a_pair_of_halves_is_one_character(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "config.json") == {"a": "\U0001f600"}


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"two\nlines.txt", b"back\\slash.txt"])
def test_file_names_that_the_manifest_cannot_hold_are_refused(tmp_path, name):
    base = write_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base)
    (base / os.fsdecode(name)).touch()
    with pytest.raises(UserError, match="rename that file"):
        plan_graft(base, head)


def test_pickles_named_by_the_index_are_refused(tmp_path):
    base = write_base(tmp_path / "base")
    edit_json(base / INDEX_NAME, lambda v: v["weight_map"].update({"lm_head.weight": "a.bin"}))
    with pytest.raises(UserError, match=r"a\.bin; convert"):
        Checkpoint(base)


def test_a_hub_cache_snapshot_is_read_through_its_links(tmp_path):
    base = write_base(tmp_path / "base")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "rev"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(base.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    checkpoint = Checkpoint(snapshot)
    assert "lm_head.weight" in checkpoint and not checkpoint.unindexed
    victim = (snapshot / checkpoint.info("lm_head.weight").shard.name).resolve()
    victim.unlink()
    with pytest.raises(UserError, match="a broken link"):
        Checkpoint(snapshot)


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
def test_a_broken_link_is_not_taken_for_an_absent_file(tmp_path, name):
    base = write_base(tmp_path / "base")
    (base / name).unlink()
    (base / name).symlink_to("gone")
    with pytest.raises(UserError, match=f"{name}; found a broken link to gone"):
        Checkpoint(base)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    base = write_base(tmp_path / "base", index=False)
    os.mkfifo(base / "pipe.safetensors")
    with pytest.raises(UserError, match="not a plain file"):
        Checkpoint(base)


def test_numbers_in_names_do_not_fill_the_memory(tmp_path):
    with pytest.raises(UserError, match=r"mtp\.layers\.999999998"):
        count_head_layers(["mtp.layers.999999998.input_layernorm.weight"])
    assert count_head_layers(["mtp.layers.00.x", "mtp.layers.٣.x"]) == 0  # not numbers of ours
    tensor = torch.ones(2, 2)
    with pytest.raises(UserError, match="2999999996 tensors missing") as caught:
        fuse_experts({"m.experts.999999998.up_proj.weight": tensor})
    assert len(str(caught.value)) < 2000
    with pytest.raises(UserError, match="2 tensors missing"):
        fuse_experts({"m.experts.0.up_proj.weight": tensor})
    config = json.loads((write_base(tmp_path / "b", nested=False) / "config.json").read_text())
    with pytest.raises(UserError, match="num_experts"):
        head_tensor_shapes(config | {"num_experts": 10**9}, 1, "per_expert")
    with pytest.raises(UserError, match="hidden_size"):
        head_tensor_shapes(config | {"hidden_size": 10**12}, 1)


def test_verify_answers_a_hostile_layer_number(tmp_path):
    base = write_base(tmp_path / "base", declared=1)
    save_file({"mtp.layers.123456789.x": torch.ones(1)}, base / "mtp.safetensors")
    report = verify_graft(base)
    assert not report.ok and "123456788" not in str(report.failures)


@pytest.mark.parametrize("name", ["language_model.mtp.fc.weight", "model.mtp.fc.weight",
                                  "model.language_model.mtp.fc.weight"])  # fmt: skip
def test_bug_C5_heads_under_a_prefix_of_other_engines(tmp_path, name):
    base = write_base(tmp_path / "base", **BASES["single file, no index"])
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {name: torch.ones(32, 64)}, base / "model.safetensors")
    with pytest.raises(UserError, match="MLX"):
        Checkpoint(base).require_supported()


STRANGE = [None, True, -1, 10**9, 1.5, "", "re:(", [], [1], [None], {}, {"a": 5}, [[]], "gone"]
CONFIGS = ("config.json", "hf_quant_config.json", INDEX_NAME, "graft.manifest.json", "head.json")


@pytest.fixture(scope="module")
def grafts(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("grafts"), []
    for name in (None, "modelopt MIXED_PRECISION", "compressed-tensors W4A16", "FP8 block"):
        base = write_base(folder / f"base {name}", quantized=name, declared=1)
        head = write_tiny_head(folder / f"head {name}", base, num_layers=1)
        out = write_graft(plan_graft(base, head), folder / f"out {name}", link="copy").out
        made.append((base, head, out))
    return made


def places(value, path=()):
    """Every place in a JSON value; of a list the first two items."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for key, item in items:
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))
        else:
            yield (*path, key)


@settings(max_examples=40, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_any_value_anywhere_in_a_config_is_read_or_refused(grafts, data):
    """What is no UserError here would reach users as a traceback; six places once did."""
    base, head, out = data.draw(st.sampled_from(grafts))
    files = [f / name for f in (base, head, out) for name in CONFIGS if (f / name).exists()]
    file = data.draw(st.sampled_from(files))
    original = file.read_bytes()
    value = json.loads(original)
    path = data.draw(st.sampled_from(list(places(value))[1:]))
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    strange = data.draw(st.sampled_from(STRANGE))
    parent[path[-1]] = strange
    if strange == "gone":
        del parent[path[-1]]
    file.write_text(json.dumps(value))
    try:
        for look in (
            lambda: inspect_checkpoint(base).as_text(), lambda: inspect_checkpoint(out).as_text(),
            lambda: verify_graft(out, base).as_text(), lambda: plan_graft(base, head),
            lambda: plan_ungraft(out, base), lambda: verify_graft(out).as_dict(),
        ):  # fmt: skip
            with contextlib.suppress(UserError):
                look()
    finally:
        file.write_bytes(original)


def test_a_quantization_file_that_says_nothing_is_refused_not_dropped(tmp_path):
    base = write_base(tmp_path / "base")
    for empty in ({}, {"quantization": {}}, {"quantization": None}):
        (base / "hf_quant_config.json").write_text(json.dumps(empty))
        with pytest.raises(UserError, match="a quantization block in"):
            quantization_blocks(Checkpoint(base))


def test_a_head_folder_that_is_also_the_base_leaves_no_head_json_behind(tmp_path):
    base = write_base(tmp_path / "base")
    head = write_tiny_head(tmp_path / "head", base, num_layers=2)
    shutil.copy(head / "head.json", base)
    assert "head.json" in plan_graft(base, head).left_out_files
