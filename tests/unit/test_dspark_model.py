"""The draft's numerics: against a slow reference, and against speculators' own class."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).parents[1]))
from dspark_reference import block_hidden, slot_logits
from dspark_tiny import TINY, random_draft, random_inputs, tiny_config

from mtp.dspark.model import KERNELS, RMSNorm, block_parts

ANCHORS = torch.tensor([[0, 1, 5, 9, 10], [3, 4, 11, 11, 11]])


def run(model, config, anchors, num_tokens=13, num_slots=None):
    ids, aux, embedding, blocks = random_inputs(config, len(anchors), num_tokens, anchors)
    blocks = blocks[..., :num_slots]
    with torch.no_grad():
        hidden = model(aux, F.embedding(blocks, embedding), anchors)
    return ids, aux, embedding, blocks, hidden


@pytest.mark.parametrize("window", [40, 5])
@pytest.mark.parametrize("num_slots", [4, 3])
def test_backbone_and_heads_equal_the_slow_reference(window, num_slots, monkeypatch):
    """Also with fewer slots than a block, in several parts, and past the window."""
    monkeypatch.setattr("mtp.dspark.model.LEAST_QUERIES", 8)
    config = tiny_config(sliding_window=window)
    model = random_draft(config)
    _, aux, embedding, blocks, hidden = run(model, config, ANCHORS, num_slots=num_slots)
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for row, anchors in enumerate(ANCHORS.tolist()):
        for number, anchor in enumerate(anchors):
            wanted = block_hidden(
                config, weights, aux[row].double(),
                embedding[blocks[row, number]].double(), anchor,
            )  # fmt: skip
            found = hidden[row, number]
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
            logits, confidence = slot_logits(weights, wanted[1], 7)
            previous = torch.tensor(7)
            torch.testing.assert_close(
                model.logits(found[1], previous).double(), logits, rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(
                model.confidence(found[1], previous).double(), confidence, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("break_it", ["window", "causal", "context", "norm"])
def test_negative_control_the_reference_notices(break_it, monkeypatch):
    config = tiny_config(sliding_window=5)
    model = random_draft(config)
    _, aux, embedding, blocks, right = run(model, config, ANCHORS)
    if break_it == "norm":
        monkeypatch.setattr(
            RMSNorm, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], 1 + self.weight)
        )
    else:

        def broken(anchors, num_slots, num_tokens, window, device):
            change = {"window": (anchors, window and window + 1), "causal": (anchors, None),
                      "context": (anchors + 1, window)}  # fmt: skip
            anchors, window = change[break_it]
            return block_parts(anchors, num_slots, num_tokens, window, device)

        monkeypatch.setattr("mtp.dspark.model.block_parts", broken)
    with torch.no_grad():
        wrong = model(aux, F.embedding(blocks, embedding), ANCHORS)
    assert (wrong - right).abs().max() > 1e-3


def test_blocks_do_not_see_each_other_nor_other_rows_nor_what_follows():
    model = random_draft()
    _, aux, embedding, blocks, hidden = run(model, TINY, ANCHORS)
    changed = aux.clone()
    changed[0, 5:] += 1
    changed[1] += 1
    others = blocks.clone()
    others[0, 3:] = 2
    with torch.no_grad():
        again = model(changed, F.embedding(others, embedding), ANCHORS)
    torch.testing.assert_close(again[0, :3], hidden[0, :3])
    assert (again[0, 3:] - hidden[0, 3:]).abs().max() > 1e-3
    assert (again[1] - hidden[1]).abs().max() > 1e-3


def test_in_sliding_layers_later_slots_change_nothing():
    """So a draft of block 8 may be served with 7 tokens; a full layer would see one slot less."""
    causal = tiny_config(layer_types=("sliding_attention",) * 2)
    for config, same in ((causal, True), (TINY, False)):
        model = random_draft(config)
        *_, short = run(model, config, ANCHORS, num_slots=3)
        *_, whole = run(model, config, ANCHORS)
        assert torch.allclose(short, whole[:, :, :3], rtol=1e-5, atol=1e-6) is same


def test_checkpointed_layers_give_the_same_gradients():
    model = random_draft().train()
    _, aux, embedding, blocks, _ = run(model, TINY, ANCHORS)
    gradients = []
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        model(aux, F.embedding(blocks, embedding), ANCHORS).square().sum().backward()
        gradients.append(model.layers[0].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=0)


@pytest.mark.parametrize("left_alone", [False, True])
def test_attention_keeps_to_kernels_whose_gradients_hold(left_alone, monkeypatch):
    """cuDNN's backward pass with a mask can give NaN on Hopper (pytorch#196678)."""
    allowed = []
    plain = F.scaled_dot_product_attention

    def noting(*args, **keywords):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*args, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    if left_alone:  # the control
        with_cudnn = [*KERNELS, SDPBackend.CUDNN_ATTENTION]
        monkeypatch.setattr("mtp.dspark.model.KERNELS", with_cudnn)
    model, anchors = random_draft(), torch.tensor([[2, 5]])
    _, aux, embedding, blocks = random_inputs(TINY, 1, 12, anchors)
    model(aux, embedding[blocks], anchors)
    assert allowed == [left_alone] * len(TINY.layer_types)
    assert torch.backends.cuda.cudnn_sdp_enabled()
