"""The norm against transformers' own: value, gradients, types."""

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm

from mtp.norms import ZeroCentredNorm, replace_norms

SIZE = 48


def value_and_gradients(norm, x):
    x = x.clone().requires_grad_()
    output = norm(x)
    direction = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output)
    return output, *torch.autograd.grad(output, [x, norm.weight], direction)


@pytest.fixture
def norms():
    theirs = Qwen3_5MoeRMSNorm(SIZE, eps=1e-3)
    torch.nn.init.normal_(theirs.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    return theirs, ZeroCentredNorm(theirs.weight, theirs.eps)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0)])
def test_equal_to_transformers(norms, dtype, tolerance):
    """In BF16 the value is rounded once, from the same float32 number but for its last bit."""
    x = torch.randn(3, 5, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, found = (value_and_gradients(norm, x) for norm in norms)
    assert all(f.dtype == e.dtype for f, e in zip(found, expected, strict=True))
    tolerance = tolerance or 2**-8
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)


def test_float64_stays_float64(norms):
    x = torch.randn(4, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    norm = norms[1].double()
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + norm.weight)
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=0)


def test_negative_control_a_weight_that_is_not_zero_centred_is_seen(norms):
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(3))
    shifted = ZeroCentredNorm(torch.nn.Parameter(norms[0].weight.detach() - 1), 1e-3)
    assert (shifted(x) - norms[0](x)).abs().max() > 0.5


def test_every_norm_is_replaced_and_keeps_its_weight_and_name():
    theirs = torch.nn.Sequential(Qwen3_5MoeRMSNorm(4), torch.nn.ModuleList([Qwen3_5MoeRMSNorm(4)]))
    before = dict(theirs.named_parameters())
    replace_norms(theirs, Qwen3_5MoeRMSNorm)
    after = dict(theirs.named_parameters())
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)
    assert not any(isinstance(module, Qwen3_5MoeRMSNorm) for module in theirs.modules())
