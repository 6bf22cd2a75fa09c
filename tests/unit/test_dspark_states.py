"""The outputs of base layers that a DSpark draft reads: in process, cached, from a server."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from random_bases import save_random_base
from states_server import StatesServer
from training import write_training_data

from graft.errors import UserError
from graft.reader import Checkpoint
from mtp.data.batches import collate
from mtp.data.store import load_prepared
from mtp.recipe import DSparkRecipe
from mtp.teacher import Teacher
from mtp.teacher.cache import build_cache
from mtp.teacher.cached import CachedSource
from mtp.teacher.server import Patience, ServerSource, extraction_arguments

LAYERS = (1, 3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "base"
    save_random_base(folder, vocab_size=16, layer_types=["full_attention"] * 3)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def teacher(base):
    return Teacher.load(base, device="cpu")


@pytest.fixture(scope="module")
def data(base):
    return write_training_data(base.parent / "data", base)


def test_layers_are_counted_by_what_is_finished_and_the_last_is_before_the_norm(teacher):
    ids = torch.arange(12).unsqueeze(0) % 16
    found = teacher.hidden(ids, (1, 2, 3)).chunk(4, dim=-1)
    assert not teacher.model.get_decoder().layers[0]._forward_hooks
    states = teacher.model.get_decoder()(
        input_ids=ids, output_hidden_states=True, use_cache=False
    ).hidden_states
    torch.testing.assert_close(found[0], states[1])
    torch.testing.assert_close(found[1], states[2])
    torch.testing.assert_close(teacher.model.get_decoder().norm(found[2]), found[3])
    torch.testing.assert_close(found[3], teacher.hidden(ids))
    assert not torch.allclose(found[0], states[0])  # an off-by-one would be the embedding


def test_cached_layers_are_the_bases_and_the_head_reads_the_same_cache(base, data, teacher):
    cache = base.parent / "cache"
    build_cache(
        teacher, base, data, cache, splits=["train"], max_gigabytes=1, shard_gigabytes=1e-5,
        layers=LAYERS,
    )  # fmt: skip
    source = CachedSource(cache, base, data, device="cpu")
    batch = collate(load_prepared(data)["train"], [3, 1, 7])
    for layers in ((), (3,), LAYERS):
        cached, fresh = source.batch_hidden(batch, layers), teacher.batch_hidden(batch, layers)
        for one, other, length in zip(cached, fresh, batch.lengths, strict=True):
            torch.testing.assert_close(one[:length], other[:length], rtol=2**-7, atol=1e-4)
    with pytest.raises(UserError, match="none of 2"):
        source.batch_hidden(batch, (1, 2))


def test_a_server_gives_the_layers_that_it_was_started_with(base, data, teacher, tmp_path):
    class LayersServer(StatesServer):
        served = (1, 3)

        def compute(self, ids):
            _, token, logprob = super().compute(ids)
            with self.lock:  # requests come side by side, hooks don't
                states = teacher.hidden(ids[None], self.served)[0].split(32, dim=-1)
            return torch.stack(states[: len(self.served)], dim=1).contiguous(), token, logprob

    assert "[1, 3]" in " ".join(extraction_arguments(Checkpoint(base), tmp_path, (1,)))
    server = LayersServer(teacher, tmp_path / "states")
    server.states.mkdir()
    try:
        source = ServerSource(
            base, server.url, server.states, device="cpu",
            patience=Patience(attempts=1, first_delay=0.01, timeout=60),
        )  # fmt: skip
        batch = collate(load_prepared(data)["train"], [3, 1])
        for layers in ((1,), (1, 3), ()):
            found, wanted = source.batch_hidden(batch, layers), teacher.batch_hidden(batch, layers)
            for one, other, length in zip(found, wanted, batch.lengths, strict=True):
                torch.testing.assert_close(one[:length], other[:length], rtol=1e-4, atol=1e-4)
        with pytest.raises(UserError, match="extracts layers"):
            source.batch_hidden(batch, (1, 2))
    finally:
        server.shutdown()
        server.server_close()


def test_aux_layers_scale_with_the_base_and_rise():
    assert DSparkRecipe().layers_read(40) == (9, 19, 29)
    assert DSparkRecipe().layers_read(12) == (3, 6, 9)
    assert DSparkRecipe().layers_read(2) == (1,)
    assert DSparkRecipe(aux_layers=(1, 2)).layers_read(2) == (1, 2)
    for wrong in ((2, 1), (1, 1), (0, 1), (1, 3)):
        with pytest.raises(UserError, match="rise"):
            DSparkRecipe(aux_layers=wrong).layers_read(2)
