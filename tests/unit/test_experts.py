"""Grouped experts against transformers' plain loop, and in the arithmetic that is asked for."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeExperts,
    Qwen3_5MoeTextConfig,
)

from mtp.experts import EXPERTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_TOKENS, HIDDEN, NUM_EXPERTS, PER_TOKEN = 37, 32, 8, 3


@pytest.fixture
def experts():
    config = Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=16, num_experts=NUM_EXPERTS
    )
    torch.manual_seed(0)
    module = Qwen3_5MoeExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def inputs(seed=1, only=NUM_EXPERTS):
    """Hidden states, routing (to the first `only` experts, so that some get nothing), weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    ids = torch.rand(NUM_TOKENS, only, generator=generator).topk(PER_TOKEN).indices
    weights = torch.rand(NUM_TOKENS, PER_TOKEN, generator=generator)
    return hidden.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)


def run(module, implementation, dtype, hidden, ids, weights, autocast=False):
    """Output, and gradients by hidden states, router weights and both parameters, in float64."""
    module = copy.deepcopy(module).to(DEVICE, dtype)
    module.config._experts_implementation = implementation
    hidden, weights = (x.to(dtype).requires_grad_() for x in (hidden, weights))
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        output = module(hidden, ids, weights)
    wanted = [hidden, weights, *module.parameters()]
    direction = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output)
    return [x.double() for x in (output, *torch.autograd.grad(output, wanted, direction))]


def errors(found, expected):
    return [((f - e).norm() / e.norm()).item() for f, e in zip(found, expected, strict=True)]


@pytest.mark.parametrize("only", [NUM_EXPERTS, 4])
def test_equal_to_the_loop_with_every_gradient(experts, only):
    expected = run(experts, "eager", torch.float64, *inputs(only=only))
    assert max(errors(run(experts, EXPERTS, torch.float32, *inputs(only=only)), expected)) < 1e-5


def test_negative_control_other_routing_is_seen(experts):
    hidden, ids, weights = inputs()
    expected = run(experts, "eager", torch.float64, hidden, ids, weights)
    swapped = run(experts, EXPERTS, torch.float32, hidden, ids.flip(1), weights)
    assert min(errors(swapped, expected)) > 0.05


@pytest.mark.parametrize(
    ("implementation", "multiplied"), [(EXPERTS, torch.bfloat16), ("grouped_mm", torch.float32)]
)
def test_float32_weights_are_multiplied_as_autocast_says(
    experts, monkeypatch, implementation, multiplied
):
    """The second row is transformers' own, which autocast does not reach: why this one exists."""
    grouped_mm, seen = F.grouped_mm, set()

    def record(rows, weight, **keywords):
        seen.update((rows.dtype, weight.dtype))
        return grouped_mm(rows, weight, **keywords)

    monkeypatch.setattr(F, "grouped_mm", record)
    found = run(experts, implementation, torch.float32, *inputs(), autocast=True)
    assert seen == {multiplied}
    expected = run(experts, "eager", torch.float64, *inputs())
    assert max(errors(found, expected)) < 0.02


def test_frozen_experts_get_no_gradient_and_pass_it_on(experts):
    expected = run(experts, EXPERTS, torch.float32, *inputs())[1]
    experts.to(DEVICE).requires_grad_(False)
    experts.config._experts_implementation = EXPERTS
    hidden, ids, weights = inputs()
    output = experts(hidden.requires_grad_(), ids, weights)
    direction = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output)
    (found,) = torch.autograd.grad(output, [hidden], direction)
    torch.testing.assert_close(found.double(), expected)
    assert all(parameter.grad is None for parameter in experts.parameters())
