"""Muon against a plain float64 Newton-Schulz, and who updates what."""

import pytest
import torch

from mtp.muon import COEFFICIENTS, Muon, newton_schulz, orthogonal_update
from mtp.optimizer import build_optimizers
from mtp.recipe import TrainRecipe


def reference(matrix):
    """One matrix, float64, the published iteration as it is written."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    if x.shape[0] > x.shape[1]:
        return reference(matrix.T).T
    for _ in range(5):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_each_expert_is_iterated_as_a_matrix_of_its_own(shape):
    torch.manual_seed(0)
    stack = torch.randn(3, *shape)
    found = newton_schulz(stack)
    wanted = torch.stack([reference(matrix) for matrix in stack])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    flat = newton_schulz(stack.reshape(1, -1, shape[-1])).reshape(stack.shape)
    if shape != (1, 5):
        assert (flat.double() - wanted).abs().max() > 0.05  # negative control: one big matrix


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(2, 32, 48)))
    assert values.min() > 0.5 and values.max() < 1.4


def test_gate_and_up_are_two_matrices():
    torch.manual_seed(0)
    stacked = torch.randn(2, 8, 5)
    gate, up = stacked[:, :4], stacked[:, 4:]
    wanted = torch.cat([orthogonal_update(gate), orthogonal_update(up)], dim=1)
    torch.testing.assert_close(orthogonal_update(stacked, 2), wanted)
    assert not torch.allclose(orthogonal_update(stacked, 1), wanted)


def test_a_step_is_momentum_decay_and_the_orthogonal_update():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 6))
    optimizer = Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.5)
    expected, buffer = weight.detach().double().clone(), torch.zeros(4, 6).double()
    for _ in range(3):
        gradient = torch.randn(4, 6)
        weight.grad = gradient.clone()
        optimizer.step()
        buffer = 0.9 * buffer + 0.1 * gradient.double()
        update = reference(0.1 * gradient.double() + 0.9 * buffer) * 0.2 * 6**0.5
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * update
        torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-4, atol=1e-5)


def test_every_parameter_has_one_optimizer_and_routers_keep_adamw(random_base):
    from graft.reader import Checkpoint
    from mtp.warm_start import head_from_base

    head = head_from_base(Checkpoint(random_base), 2)
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    muon, adamw = build_optimizers(head, TrainRecipe(optimizer="muon"))

    def held(optimizer):
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    assert sorted(held(muon) + held(adamw)) == sorted(names.values())
    assert "fc.weight" in held(muon) and "layers.1.mlp.experts.down_proj" in held(muon)
    for part in ("mlp.gate.weight", "shared_expert_gate", "norm"):
        assert any(part in name for name in held(adamw))
        assert not any(part in name for name in held(muon))
    stacked = {names[id(p)] for p in muon.param_groups[1]["params"]}
    assert stacked == {f"layers.{k}.mlp.experts.gate_up_proj" for k in range(2)}
    assert [group["num_stacked"] for group in muon.param_groups] == [1, 2]
    assert adamw.param_groups[0]["betas"] == (0.9, 0.95)  # Bebop's (arXiv 2606.12370)
    assert len(build_optimizers(head, TrainRecipe())) == 1
