"""The CUDA branches of the losses and of the repeated layer: their kernels against float64.

They run with `pytest -m gpu tests/gpu` on a machine with a CUDA device; elsewhere they are skipped.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from test_losses import TERMS, fused, random_case, reference, relative_error
from test_repeated_layer import masked_attention, tensors

from mtp.losses import Objective
from mtp.repeated_layer import _JoinedAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(case):
    for name in ("hidden", "ids", "mask", "lm_head", "position_weights", "row_weights"):
        setattr(case, name, getattr(case, name).cuda())
    case.outputs = [output.detach().cuda().requires_grad_() for output in case.outputs]
    return case


@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "tolerance"),
    [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-4, 2e-2)],
)
@pytest.mark.parametrize("term", TERMS)
def test_losses(term, dtype, loss_tolerance, tolerance):
    """bfloat16 products come out in float32 here, so the loss is nearer than on a CPU."""
    case = random_case(7, rows=4, length=40, vocabulary=304, size=48)
    for tensor in (*case.outputs, case.hidden, case.lm_head):
        tensor.data.copy_(tensor.data.bfloat16().double())
    loss, gradients = reference(case, Objective(**{term: 1.0}))
    result, found = fused(on_gpu(case), Objective(**{term: 1.0}), dtype, chunk_size=16)
    assert relative_error([result.loss.cpu()], [loss]) < loss_tolerance
    assert relative_error([gradient.cpu() for gradient in found], gradients) < tolerance


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("window", [33, 512])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_joined_attention(dtype, tolerance, window, size):
    """Flash attention's operators in bfloat16, the memory-efficient ones in float32."""
    inputs = tensors(1, 2, 4, 2, window, 3, size, torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = masked_attention(*wide, size**-0.5)
    by_output = torch.randn(expected.shape).bfloat16()
    wanted = torch.autograd.grad(expected, wide, by_output.double())
    same = [tensor.detach().to("cuda", dtype).requires_grad_() for tensor in inputs]
    found = _JoinedAttention.apply(*same, size**-0.5)
    gradients = torch.autograd.grad(found, same, by_output.to("cuda", dtype))
    assert relative_error([found.cpu()], [expected.detach()]) < tolerance
    for gradient, reference_ in zip(gradients, wanted, strict=True):
        assert relative_error([gradient.cpu()], [reference_]) < tolerance
