"""The chain against a plain rendering of its definition, position by position."""

import pytest
import torch
import torch.nn.functional as F

from graft.errors import UserError
from graft.manifest import base_fingerprint
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.writer import write_graft
from mtp.head import MTPHead, load_head, open_head, save_head
from mtp.teacher import Teacher
from mtp.warm_start import head_from_base
from quantize.trunk import quantize_trunk


@pytest.fixture(scope="module")
def teacher(random_base):
    return Teacher.load(random_base, device="cpu")


@pytest.fixture(scope="module")
def head(random_base):
    torch.manual_seed(5)
    head = head_from_base(Checkpoint(random_base), 4, "random")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.3)
    return head.eval()


def zero_centred_norm(x, weight, eps):
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (1 + weight.double())


def test_bug_C3_the_chain_is_what_the_definition_says(teacher, head):
    """Each output recomputed from only the prefix it may see, input projection written out."""
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        base = teacher.hidden(ids)
        outputs = head.chain(base, teacher.embed(ids))
        embeddings = teacher.model.get_input_embeddings().weight
        previous = base
        for k, output in enumerate(outputs):
            assert output.shape == (2, 9 - 1 - k, 32)
            for i in range(output.shape[1]):
                # Position j <= i reads token j+k+1 and the previous module at j.
                tokens = ids[:, k + 1 : k + 2 + i]
                e = zero_centred_norm(embeddings[tokens], head.pre_fc_norm_embedding.weight, 1e-6)
                g = zero_centred_norm(previous[:, : i + 1], head.pre_fc_norm_hidden.weight, 1e-6)
                x = torch.cat([e, g], -1) @ head.fc.weight.double().T
                positions = torch.arange(i + 1).expand(3, 1, -1)
                x = head.layers[k](
                    x.float(),
                    position_embeddings=head.rotary_emb(x.float(), positions),
                    attention_mask=None,
                )
                expected = zero_centred_norm(x[:, -1], head.norm.weight, 1e-6)
                torch.testing.assert_close(output[:, i].double(), expected, rtol=1e-3, atol=1e-3)
            previous = output


def test_modules_are_distinct_and_shift(teacher, head):
    """The check above must be able to fail: with two layers swapped, outputs differ."""
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        hidden, embeddings = teacher.hidden(ids), teacher.embed(ids)
        outputs = head.chain(hidden, embeddings)
        head.layers[1], head.layers[2] = head.layers[2], head.layers[1]
        swapped = head.chain(hidden, embeddings)
        head.layers[1], head.layers[2] = head.layers[2], head.layers[1]
    torch.testing.assert_close(outputs[0], swapped[0])
    assert (outputs[1] - swapped[1]).abs().max() > 0.01


def test_padding_on_the_right_changes_nothing(teacher, head):
    ids = torch.randint(0, 64, (1, 8), generator=torch.Generator().manual_seed(2))
    padded = F.pad(ids, (0, 5))
    with torch.no_grad():
        short = head.chain(teacher.hidden(ids), teacher.embed(ids))
        long = head.chain(teacher.hidden(padded), teacher.embed(padded))
    for k, output in enumerate(short):
        torch.testing.assert_close(output, long[k][:, : output.shape[1]], rtol=1e-4, atol=1e-5)


def test_more_steps_than_layers_start_again(teacher, head):
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        hidden, embeddings = teacher.hidden(ids), teacher.embed(ids)
        outputs = head.chain(hidden, embeddings, num_steps=6)
        again = head.step(0, outputs[3][:, :7], embeddings[:, 5:], torch.arange(7))
    torch.testing.assert_close(outputs[4], again)


def test_warm_start_from_the_last_full_attention_layer(random_base):
    base = Checkpoint(random_base)
    head = head_from_base(base, 4, "auto")
    name = "self_attn.q_proj.weight"
    for layer in head.layers:
        found = layer.state_dict()[name]
        torch.testing.assert_close(found, base.load(f"model.layers.1.{name}").float())
        # The trunk is stored per expert: gate first, then up.
        gate, up = (
            base.load(f"model.layers.1.mlp.experts.2.{part}_proj.weight").float()
            for part in ("gate", "up")
        )
        torch.testing.assert_close(layer.mlp.experts.gate_up_proj[2], torch.cat([gate, up]))
    torch.testing.assert_close(head.norm.weight, base.load("model.norm.weight").float())


def test_warm_start_from_a_quantized_layer_is_what_the_base_computes_with(random_base, tmp_path):
    quantize_trunk(random_base, tmp_path / "nvfp4")
    head = head_from_base(Checkpoint(tmp_path / "nvfp4"), 1, "last")
    wanted = Teacher.load(tmp_path / "nvfp4", device="cpu").model.model.layers[-1].state_dict()
    plain = Teacher.load(random_base, device="cpu").model.model.layers[-1].state_dict()
    found = head.layers[0].state_dict()
    assert found.keys() == wanted.keys()
    close = {"rtol": 1 / 256, "atol": 0.0}  # a head starts from bfloat16 values
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name].float(), **close)
    name = "mlp.experts.down_proj"
    assert not torch.allclose(found[name], plain[name].float(), **close)


def test_native_warm_start_copies_layer_0_to_all(head, random_base, tmp_path):
    """A base that brings a head: grafted here, as the real ones ship it."""
    native = tmp_path / "native"
    native.mkdir()
    fingerprint = base_fingerprint(Checkpoint(random_base))
    save_head(head, native, base_fingerprint=fingerprint, provenance={})
    write_graft(plan_graft(random_base, native), tmp_path / "base")
    started = head_from_base(Checkpoint(tmp_path / "base"), 3, "auto").state_dict()
    for name, tensor in load_head(native).state_dict().items():
        if name.startswith("layers.0."):
            for k in range(3):
                assert torch.equal(started[name.replace("layers.0.", f"layers.{k}.", 1)], tensor)
        elif not name.startswith("layers."):
            assert torch.equal(started[name], tensor), name


def test_native_warm_start_needs_a_native_head(random_base):
    with pytest.raises(UserError, match="native MTP layer"):
        head_from_base(Checkpoint(random_base), 4, "native")


def test_save_and_load_give_the_same_head(head, random_base, tmp_path):
    save_head(head, tmp_path, base_fingerprint={"schema_version": 1}, provenance={})
    loaded = load_head(tmp_path)
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16).float()), name


def test_a_head_of_another_base_is_refused(head, random_base, few_words_base, tmp_path):
    base, other = Checkpoint(random_base), Checkpoint(few_words_base)
    save_head(head, tmp_path, base_fingerprint=base_fingerprint(base), provenance={})
    assert open_head(tmp_path, base).num_layers == 4
    with pytest.raises(UserError, match=r"a head trained on .*few.*vocab_size"):
        open_head(tmp_path, other)


def test_another_family_is_refused():
    with pytest.raises(UserError, match="llama"):
        MTPHead({"model_type": "llama"}, 4)
