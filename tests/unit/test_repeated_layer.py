"""The repeated layer: joined attention against one with a mask, its chain against single tokens."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from graft.reader import Checkpoint
from mtp.repeated_layer import RepeatedLayerCache, _JoinedAttention, chain_attention
from mtp.teacher import Teacher
from mtp.warm_start import head_from_base


def masked_attention(query, key, value, own_key, own_value, scale):
    """One attention over [step 0 | own keys of each step], with the mask that it stands for."""
    groups = query.shape[1] // key.shape[1]
    window, steps = query.shape[2], own_key.shape[2]
    keys = torch.cat([key, *own_key.unbind(2)], dim=2).repeat_interleave(groups, dim=1)
    values = torch.cat([value, *own_value.unbind(2)], dim=2).repeat_interleave(groups, dim=1)
    causal = torch.ones(window, window, dtype=torch.bool).tril()
    mask = torch.cat([causal, *[torch.eye(window, dtype=torch.bool)] * steps], dim=1)
    scores = (query @ keys.mT * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ values


def tensors(seed, rows, groups, key_heads, window, steps, size, dtype, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, groups * key_heads, window, size), *[(rows, key_heads, window, size)] * 2,
              *[(rows, key_heads, steps, window, size)] * 2]  # fmt: skip
    return [
        (torch.randn(shape, generator=generator) * spread).to(dtype).requires_grad_()
        for shape in shapes
    ]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 2),
    groups=st.integers(1, 3),
    key_heads=st.integers(1, 2),
    window=st.integers(1, 40),
    steps=st.integers(1, 4),
    spread=st.sampled_from([0.3, 1.0, 4.0]),
)
def test_joined_attention_and_its_gradients_equal_the_masked_ones(
    seed, rows, groups, key_heads, window, steps, spread
):
    inputs = tensors(seed, rows, groups, key_heads, window, steps, 16, torch.float64, spread)
    expected = masked_attention(*inputs, 0.25)
    by_output = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, inputs, by_output)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        same = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        found = _JoinedAttention.apply(*same, 0.25)
        assert relative_error(found, expected) < tolerance
        gradients = torch.autograd.grad(found, same, by_output.to(dtype))
        assert relative_error(joined(gradients), joined(wanted)) < tolerance


def joined(gradients):
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_bfloat16_joined_attention():
    inputs = tensors(1, 2, 2, 2, 40, 3, 16, torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = _JoinedAttention.apply(*inputs, 0.25), masked_attention(*wide, 0.25)
    assert relative_error(found, expected) < 1e-2
    by_output = torch.randn(expected.shape).bfloat16()
    pairs = zip(
        torch.autograd.grad(found, inputs, by_output),
        torch.autograd.grad(expected, wide, by_output.double()),
        strict=True,
    )
    assert all(relative_error(gradient, reference) < 2e-2 for gradient, reference in pairs)


@pytest.mark.parametrize("wrong", range(5))
def test_negative_control_every_input_matters(wrong):
    inputs = tensors(2, 1, 2, 1, 9, 2, 16, torch.float64)
    expected = masked_attention(*inputs, 0.25)
    inputs[wrong] = inputs[wrong] + 0.1 * torch.randn_like(inputs[wrong])
    assert relative_error(_JoinedAttention.apply(*inputs, 0.25), expected) > 1e-3


@pytest.fixture(scope="module")
def teacher(random_base):
    return Teacher.load(random_base, device="cpu")


@pytest.fixture(scope="module")
def head(random_base):
    torch.manual_seed(5)
    head = head_from_base(Checkpoint(random_base), 2, "random").eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(std=0.3 if "norm" in name else 0.2)
    head.config._experts_implementation = "eager"  # grouped_mm knows no float64
    return head.double()


def token_by_token(head, hidden, embeddings, num_steps):
    """What a stock vLLM does for each start p by itself: the window up to p, then its own outputs
    at the next positions, each time the whole sequence anew through a plain causal layer."""
    length = hidden.shape[1]
    outputs = [[] for _ in range(num_steps)]
    for start in range(length - 1):
        inputs = hidden[:, : start + 1]
        for k in range(min(num_steps, length - 1 - start)):
            following = embeddings[:, 1 : start + k + 2]
            output = head.step(0, inputs, following, torch.arange(start + k + 1))[:, -1:]
            outputs[k].append(output)
            inputs = torch.cat([inputs, output], dim=1)
    return [torch.cat(step, dim=1) for step in outputs]


def gradients_of(head, outputs, factors):
    head.zero_grad()
    sum((o * f).sum() for o, f in zip(outputs, factors, strict=True)).backward()
    return {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}


def test_chain_stock_and_every_gradient_equal_token_by_token(teacher, head):
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    hidden, embeddings = teacher.hidden(ids).double(), teacher.embed(ids).double()
    expected = token_by_token(head, hidden, embeddings, 4)
    found = head.chain_stock(hidden, embeddings, 4)
    for step, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(step, reference, rtol=1e-9, atol=1e-10)
    factors = [torch.randn_like(output) for output in found]
    wanted = gradients_of(head, expected, factors)
    gradients = gradients_of(head, found, factors)
    assert set(gradients) == set(wanted)
    assert any(name.startswith("layers.0.self_attn.k_proj") for name in wanted)
    assert not any(name.startswith("layers.1.") for name in wanted)
    for name, reference in wanted.items():  # the router's softmax is float32 in every precision
        assert relative_error(gradients[name], reference) < 1e-5, name


def test_the_routed_chain_is_something_else(teacher, head):
    """The comparison above can fail: already a one-layer head gives other outputs routed."""
    ids = torch.arange(8).unsqueeze(0)
    hidden, embeddings = teacher.hidden(ids).double(), teacher.embed(ids).double()
    stock = head.chain_stock(hidden, embeddings, 3)
    routed = head.chain(hidden, embeddings, 3)
    torch.testing.assert_close(stock[0], routed[0])
    assert (stock[2] - routed[2]).abs().max() > 1e-3


def test_both_are_the_two_chains(teacher, head):
    ids = torch.arange(9).unsqueeze(0)
    hidden, embeddings = teacher.hidden(ids).double(), teacher.embed(ids).double()
    both = head.chains("both", hidden, embeddings, 4)
    assert list(both) == ["routed", "stock"]
    for found, expected in (
        (both["routed"], head.chain(hidden, embeddings, 4)),
        (both["stock"], head.chain_stock(hidden, embeddings, 4)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_step_that_is_computed_again_gives_the_same_gradients(teacher, head):
    """Activation checkpointing runs `step` twice; the cache must not notice."""
    ids = torch.randint(0, 64, (1, 10), generator=torch.Generator().manual_seed(3))
    hidden, embeddings = teacher.hidden(ids).double(), teacher.embed(ids).double()
    outputs = head.chain_stock(hidden, embeddings, 4)
    factors = [torch.randn_like(output) for output in outputs]
    wanted = gradients_of(head, outputs, factors)
    plain, calls = head.step, []

    def again(*arguments, **keywords):
        calls.append(1)
        return checkpoint(plain, *arguments, use_reentrant=False, **keywords)

    head.step = again
    try:
        gradients = gradients_of(head, head.chain_stock(hidden, embeddings, 4), factors)
    finally:
        del head.step
    assert len(calls) == 4
    for name, reference in wanted.items():
        torch.testing.assert_close(gradients[name], reference)


def test_the_first_step_is_plain_causal_attention():
    query, key, value, *_ = tensors(4, 1, 2, 2, 6, 1, 16, torch.float32)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    cache = RepeatedLayerCache()
    keys, values = cache.at(0).update(key, value)
    found, _ = chain_attention(module, query, keys, values, None, scaling=0.25, chain=cache.at(0))
    expected = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))
