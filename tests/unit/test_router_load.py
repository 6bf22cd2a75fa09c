"""Expert load against a recount, and routers that stay as they were."""

import math

import pytest
import torch

from graft.reader import Checkpoint
from mtp.head import MTPHead
from mtp.recipe import Recipe
from mtp.router_load import RouterLoad, freeze_routers, routers
from mtp.warm_start import head_from_base

TINY_DENSE = {
    "model_type": "qwen3_5_text", "hidden_size": 32, "vocab_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def head(random_base):
    torch.manual_seed(3)
    return head_from_base(Checkpoint(random_base), 2, "random")


def inputs(length=7):
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, length, 32, generator=generator) for _ in range(2))


def test_load_is_a_recount_of_what_the_routers_chose(head):
    chosen = {}
    for k, router in routers(head).items():
        router.register_forward_hook(
            lambda _m, _i, out, k=k: chosen.setdefault(k, []).extend(out[2].flatten().tolist())
        )
    load = RouterLoad(head)
    for _ in range(2):
        head.chain(*inputs())
    found = load.read()
    assert [layer.layer for layer in found] == [0, 1]
    for layer in found:
        counts = [chosen[layer.layer].count(expert) for expert in range(4)]
        assert sum(counts) == 2 * 2 * 2 * (6 - layer.layer)  # passes, rows, top 2, window
        assert layer.share == pytest.approx([count / sum(counts) for count in counts])
        mean = sum(counts) / 4
        deviation = math.sqrt(sum((count - mean) ** 2 for count in counts) / 4)
        assert layer.variation == pytest.approx(deviation / mean)
    assert load.read() == []
    load.remove()
    head.chain(*inputs())
    assert load.read() == []


def test_a_collapsed_router_shows_as_one(head):
    """The statistic can tell: all tokens on the same 2 of 4 experts."""
    with torch.no_grad():
        for router in routers(head).values():
            router.weight.zero_()
    load = RouterLoad(head)
    head.chain(*inputs())
    assert load.read()[0].variation == pytest.approx(math.sqrt(4 / 2 - 1))


def test_a_frozen_router_has_no_gradient_and_the_rest_has(head):
    freeze_routers(head)
    sum(output.sum() for output in head.chain(*inputs())).backward()
    gradients = {name: parameter.grad is not None for name, parameter in head.named_parameters()}
    assert all(has != name.endswith("mlp.gate.weight") for name, has in gradients.items())
    assert sum(not has for has in gradients.values()) == 2


def test_routers_train_by_default(head):
    assert Recipe().head.train_router
    sum(output.sum() for output in head.chain(*inputs())).backward()
    assert all(router.weight.grad.any() for router in routers(head).values())


def test_a_dense_head_has_no_routers():
    head = MTPHead(TINY_DENSE, 2).float()
    load = RouterLoad(head)
    head.chain(*inputs())
    assert routers(head) == {} and load.read() == []
