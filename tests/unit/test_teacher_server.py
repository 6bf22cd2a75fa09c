"""The client of a vLLM server: same states as in process; failures are retried, then stop."""

from __future__ import annotations

import json

import pytest
import torch
from hidden_data import batch_of, write_rows
from random_bases import save_random_base
from states_server import StatesServer

from graft.errors import UserError
from graft.reader import Checkpoint
from mtp.data.store import load_prepared
from mtp.teacher import Teacher
from mtp.teacher.cache import build_cache
from mtp.teacher.cached import CachedSource
from mtp.teacher.server import Patience, ServerSource, extraction_arguments

QUICK = Patience(attempts=3, max_failures=6, first_delay=0.001, timeout=5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_random_base(tmp_path_factory.mktemp("server") / "base")


@pytest.fixture(scope="module")
def teacher(base):
    return Teacher.load(base, device="cpu")


@pytest.fixture(scope="module")
def data(base):
    return write_rows(base.parent / "data", base)


@pytest.fixture
def server(teacher, tmp_path):
    server = StatesServer(teacher, tmp_path / "states")
    server.states.mkdir()
    yield server
    server.shutdown()
    server.server_close()


def client(server, base, **options):
    options = {"device": "cpu", "patience": QUICK} | options
    return ServerSource(base, server.url, server.states, **options)


def test_states_are_those_of_the_base_and_files_are_removed(server, base, data, teacher):
    batch = batch_of(load_prepared(data)["train"], [0, 5, 2, 9], width=45)
    states, wanted = client(server, base).batch_hidden(batch), teacher.batch_hidden(batch)
    for one, other, length in zip(states, wanted, batch.lengths, strict=True):
        torch.testing.assert_close(one[:length], other[:length], rtol=1e-4, atol=1e-4)
        assert not one[length:].any()
    assert list(server.states.iterdir()) == []


FAULTS = {
    "server error": lambda tensors: 500,
    "overloaded": lambda tensors: 429,
    "no file": lambda tensors: None,
    "another row": lambda tensors: {**tensors, "token_ids": tensors["token_ids"] + 1},
    "short": lambda tensors: {**tensors, "hidden_states": tensors["hidden_states"][:-1].clone()},
    "not finite": lambda tensors: {**tensors, "hidden_states": tensors["hidden_states"] / 0},
    "wide": lambda tensors: {
        **tensors, "hidden_states": tensors["hidden_states"].repeat(1, 1, 2)},
    "nothing in it": lambda tensors: {"token_ids": tensors["token_ids"]},
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_bug_G3_a_failure_is_tried_again_and_never_becomes_padding(
    fault, server, base, data, teacher
):
    row = torch.arange(9)
    server.fault = lambda number, tensors: FAULTS[fault](tensors) if number <= 2 else tensors
    states = client(server, base).row_states([row])[0]
    torch.testing.assert_close(states, teacher.row_states([row])[0], rtol=1e-4, atol=1e-4)
    assert server.num_requests == 3
    server.fault = lambda number, tensors: FAULTS[fault](tensors)
    with pytest.raises(UserError, match="attempt 3"):
        client(server, base).row_states([row])
    assert server.num_requests == 6
    assert list(server.states.iterdir()) == []


def test_failures_of_all_rows_together_have_a_budget(server, base):
    server.fault = lambda number, tensors: 503 if number % 2 else tensors
    source = client(server, base, concurrency=1)
    with pytest.raises(UserError, match="6 failures in all"):
        source.row_states([torch.arange(5)] * 20)
    assert server.num_requests == 11


def test_what_asking_again_cannot_mend_stops_at_once(server, base):
    server.fault = lambda number, tensors: 400
    with pytest.raises(UserError, match="max-model-len"):
        client(server, base).row_states([torch.arange(5)])
    assert server.num_requests == 1


def test_states_that_do_not_give_the_servers_token_stop_at_once(server, base):
    server.fault = lambda number, tensors: {
        **tensors, "hidden_states": tensors["hidden_states"].roll(1, 0)}  # fmt: skip
    with pytest.raises(UserError, match="own predictions"):
        client(server, base).row_states([torch.arange(12)])
    assert server.num_requests == 1


def test_another_base_than_the_served_one_is_noticed(server, base, tmp_path):
    other = save_random_base(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="own predictions"):
        client(server, other).row_states([torch.arange(12)])


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "server:8000", "server"])
def test_no_server(base, tmp_path, url):
    """The last two lack http://."""
    with pytest.raises(UserError, match="vLLM server at"):
        ServerSource(base, url, tmp_path, device="cpu", patience=QUICK)


def test_a_cache_built_from_the_server_goes_on_after_a_failure(
    server, base, data, teacher, tmp_path
):
    options = {"splits": ["train"], "max_gigabytes": 1, "shard_gigabytes": 100 * 64 / 1e9}
    server.fault = lambda number, tensors: 500 if number > 60 else tensors
    with pytest.raises(UserError, match="failures in all"):
        build_cache(client(server, base), base, data, tmp_path / "cache", **options)
    server.fault = lambda number, tensors: tensors
    report = build_cache(client(server, base), base, data, tmp_path / "cache", **options)
    assert report["shards_found"] > 0 and report["argmax_agreement"] > 0.9
    source = CachedSource(tmp_path / "cache", base, data, device="cpu")
    batch = batch_of(load_prepared(data)["train"], list(range(20)))
    wanted = teacher.batch_hidden(batch)
    for one, other, length in zip(source.batch_hidden(batch), wanted, batch.lengths, strict=True):
        torch.testing.assert_close(one[:length], other[:length], rtol=2**-7, atol=1e-3)


def test_arguments_name_the_layer_before_the_final_norm(base, tmp_path):
    arguments = extraction_arguments(Checkpoint(base), tmp_path)
    speculative = json.loads(arguments[1])
    layers = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == [2] and speculative["num_speculative_tokens"] == 1
