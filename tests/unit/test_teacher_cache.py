"""The cache of hidden states: the same states and losses, and refusals of everything else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hidden_data import batch_of, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from random_bases import save_random_base
from safetensors.torch import load_file, save_file

from graft.errors import UserError
from graft.reader import Checkpoint
from mtp.data.store import load_prepared
from mtp.teacher import Teacher
from mtp.teacher.cache import build_cache
from mtp.teacher.cache_layout import plan_layout
from mtp.teacher.cached import CachedSource
from mtp.teacher.source import BaseEnds, require_own_predictions
from mtp.warm_start import head_from_base

SMALL = 100 * 2 * 32 / 1e9  # shards of 100 tokens at hidden size 32


@pytest.fixture(scope="module")
def teacher(base):
    return Teacher.load(base, device="cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_random_base(tmp_path_factory.mktemp("cache") / "base")


@pytest.fixture(scope="module")
def data(base):
    return write_rows(base.parent / "data", base)


def build(teacher, base, data, out, **options):
    wanted = {"splits": ["train"], "max_gigabytes": 1, "shard_gigabytes": SMALL} | options
    return build_cache(teacher, base, data, out, **wanted)


@pytest.fixture(scope="module")
def cache(teacher, base, data):
    report = build(teacher, base, data, base.parent / "cache", tokens_per_batch=90)
    assert report["shards"] > 3 and report["argmax_agreement"] > 0.9
    return base.parent / "cache"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_every_row_lies_in_one_place(lengths, tokens_per_shard):
    layout = plan_layout(np.array(lengths, dtype=np.int64), tokens_per_shard)
    assert sorted(np.concatenate([[], *layout.shards]).tolist()) == list(range(len(lengths)))
    for number, members in enumerate(layout.shards):
        offset = 0
        for row in members:
            assert (layout.shard_of[row], layout.offset_of[row]) == (number, offset)
            offset += lengths[row]
        assert offset - lengths[members[-1]] < tokens_per_shard


def test_states_are_those_of_the_base_rounded_to_bfloat16(cache, base, data, teacher):
    rows = load_prepared(data)["train"]
    source = CachedSource(cache, base, data, device="cpu")
    for members in ([0, 1, 2], [7], [19, 3, 11]):
        batch = batch_of(rows, members, width=41)
        cached, fresh = source.batch_hidden(batch), teacher.batch_hidden(batch)
        for one, other, length in zip(cached, fresh, batch.lengths, strict=True):
            torch.testing.assert_close(one[:length], other[:length], rtol=2**-8, atol=1e-5)
            assert torch.equal(one[length:], torch.zeros_like(one[length:]))
        torch.testing.assert_close(source.embed(batch.input_ids), teacher.embed(batch.input_ids))
    assert torch.equal(source.lm_head, teacher.lm_head)


def test_training_from_the_cache_gives_the_same_losses(cache, base, data, teacher):
    """Four steps of a head: losses equal but for bfloat16 rounding; those of other rows don't."""
    rows = load_prepared(data)["train"]
    source = CachedSource(cache, base, data, device="cpu")

    def losses(source, members):
        torch.manual_seed(0)
        head = head_from_base(Checkpoint(base), 2, "random")
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        found = []
        for row in members:
            batch = batch_of(rows, [row])
            hidden = source.batch_hidden(batch).float()
            output = head.chain(hidden, source.embed(batch.input_ids).float())[0]
            logits = F.linear(output, source.lm_head)  # at i, of the token at i + 2
            wanted = F.linear(hidden[:, 1:], source.lm_head).softmax(-1)
            loss = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    in_process = losses(teacher, [0, 1, 2, 4])
    assert losses(source, [0, 1, 2, 4]) == pytest.approx(in_process, rel=1e-3)
    assert losses(source, [5, 6, 7, 8]) != pytest.approx(in_process, rel=1e-3)


def test_states_before_the_final_norm_are_refused(base, data, teacher, tmp_path):
    class BeforeNorm:
        name, lm_head, own_predictions = "wrong", teacher.lm_head, teacher.own_predictions

        def row_states(self, rows, layers=()):
            kept = []
            norm = teacher.model.get_decoder().norm
            handle = norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
            teacher.row_states(rows)
            handle.remove()
            return [state[: len(row)] for state, row in zip(kept[0], rows, strict=True)]

    with pytest.raises(UserError, match="after the final norm"):
        build(BeforeNorm(), base, data, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))

    class NormedHere(BeforeNorm):
        ends = BaseEnds(Checkpoint(base), device="cpu")

        def row_states(self, rows, layers=()):
            return [self.ends.final_norm(state) for state in super().row_states(rows)]

    build(NormedHere(), base, data, tmp_path / "normed")  # the norm from the shards is the model's


def test_a_prediction_outside_bfloat16_rounding_is_refused(base, teacher):
    row = torch.arange(20) % 64
    hidden, positions = teacher.row_states([row])[0], torch.arange(20)
    argmax, logprob = teacher.own_predictions(row, positions)
    check = lambda *parts: require_own_predictions(parts[0], teacher.lm_head, *parts[1:], "here")  # noqa: E731
    assert check(hidden, argmax, logprob) == 1.0
    for wrong in (
        (hidden * 1.2, argmax, logprob),
        (hidden.roll(1, 0), argmax, logprob),
        (hidden, argmax.roll(1), logprob),
        (hidden, argmax, logprob + 1),
        (torch.where(positions[:, None] == 3, float("nan"), hidden), argmax, logprob),
    ):
        with pytest.raises(UserError, match="positions where it does not"):
            check(*wrong)


def test_a_killed_run_goes_on_at_its_shard(cache, base, data, teacher, tmp_path):
    class Killed(Exception):
        pass

    class Dies:
        """Counts its calls, and may die in one."""

        name, lm_head = teacher.name, teacher.lm_head
        own_predictions = teacher.own_predictions

        def __init__(self, at=None):
            self.calls, self.at = 0, at

        def row_states(self, rows, layers=()):
            self.calls += 1
            if self.calls == self.at:
                raise Killed
            return teacher.row_states(rows)

    out, whole = tmp_path / "cache", Dies()
    build(whole, base, data, tmp_path / "whole", tokens_per_batch=90)
    for at in (1, 3, 2):
        with pytest.raises(Killed):
            build(Dies(at), base, data, out, tokens_per_batch=90)
        with pytest.raises(UserError, match="finished cache"):
            CachedSource(out, base, data, device="cpu")
    last = Dies()
    report = build(last, base, data, out, tokens_per_batch=90)
    assert 0 < report["shards_found"] < report["shards"]
    assert last.calls < whole.calls
    for file in sorted((cache / "train").iterdir()):
        assert (out / "train" / file.name).read_bytes() == file.read_bytes()
    again = Dies()
    assert build(again, base, data, out)["shards_found"] == report["shards"]
    assert again.calls == 0


def test_the_command_survives_real_kills(cache, base, data, tmp_path):
    out = tmp_path / "cache"
    command = [sys.executable, "-m", "mtp.cli", "data", "cache", "--base", str(base), "--data",
               str(data), "--out", str(out), "--split", "train", "--shard-gigabytes", str(SMALL),
               "--tokens-per-batch", "90", "--device", "cpu"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list(out.rglob("0*.safetensors")) and run.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
    finally:
        run.wait()
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "GB to write" in finished.stderr
    names = sorted(path.name for path in (cache / "train").iterdir())
    assert sorted(path.name for path in (out / "train").glob("*.safetensors")) == names
    for name in names:
        assert (out / "train" / name).read_bytes() == (cache / "train" / name).read_bytes()


def test_wrong_inputs_are_refused_with_the_reason(cache, base, data, teacher, tmp_path):
    other_data = write_rows(tmp_path / "data", base, seed=1)
    with pytest.raises(UserError, match=r"token_ids_sha256\.train"):
        CachedSource(cache, base, other_data, device="cpu")
    with pytest.raises(UserError, match=r"token_ids_sha256\.train"):
        build(teacher, base, other_data, cache)
    other_base = save_random_base(tmp_path / "other", seed=9)
    shutil.copy(base / "tokenizer.json", other_base)
    with pytest.raises(UserError, match=r"base\.fingerprint\.tensor_sha256\.embed_tokens"):
        CachedSource(cache, other_base, data, device="cpu")
    with pytest.raises(UserError, match="those of train"):
        CachedSource(cache, base, data, split="held_out", device="cpu")
    with pytest.raises(UserError, match="with cache"):
        CachedSource(data, base, data, device="cpu")
    with pytest.raises(UserError, match="another folder"):
        build(teacher, base, data, data, overwrite=True)
    with pytest.raises(UserError, match="max-gigabytes"):
        build(teacher, base, data, tmp_path / "large", max_gigabytes=1e-6)
    assert not list((tmp_path / "large").rglob("*.safetensors"))


def test_a_base_that_differs_in_its_layers_only_is_refused(cache, base, data, tmp_path):
    changed = shutil.copytree(base, tmp_path / "base")
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 1.01
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="trunk_sha256"):
        CachedSource(cache, changed, data, device="cpu")


@pytest.mark.parametrize("damage", ["states", "ids", "truncated", "missing"])
def test_a_damaged_cache_is_refused(damage, cache, base, data, tmp_path):
    broken = shutil.copytree(cache, tmp_path / "cache")
    shard = broken / "train" / "00001.safetensors"
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-10])
    else:
        tensors = load_file(shard)
        key = "hidden" if damage == "states" else "input_ids"
        tensors[key] = tensors[key].roll(1, 0)
        save_file(tensors, shard, {"format": "pt"})
    rows = load_prepared(data)["train"]
    with pytest.raises(UserError):
        source = CachedSource(broken, base, data, device="cpu")
        source.batch_hidden(batch_of(rows, list(range(20))))


def test_two_runs_into_one_cache_lock_each_other_out(base, data, teacher, tmp_path):
    class Nested:
        name, lm_head = teacher.name, teacher.lm_head

        def row_states(self, rows, layers=()):
            build(teacher, base, data, tmp_path / "cache")

    with pytest.raises(UserError, match="lock"):
        build(Nested(), base, data, tmp_path / "cache")


def test_overwrite_begins_anew(cache, base, data, teacher, tmp_path):
    out = shutil.copytree(cache, tmp_path / "cache")
    with pytest.raises(UserError, match="tokens_per_shard"):
        build(teacher, base, data, out, shard_gigabytes=2 * SMALL)
    report = build(teacher, base, data, out, shard_gigabytes=2 * SMALL, overwrite=True)
    assert report["shards_found"] == 0
    index = json.loads((out / "cache.json").read_text())
    assert index["complete"] and index["position"] == "after the final norm"
    CachedSource(out, base, data, device="cpu")
