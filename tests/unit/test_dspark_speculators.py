"""Against speculators 0.9.0 itself, where it is installed (its caps on torch and transformers keep
it out of the development environment): PYTHONPATH=folder of `pip install --target`."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from dspark_tiny import random_draft, random_inputs, tiny_config

from mtp.dspark.config import config_for_base
from mtp.dspark.config_json import to_json
from mtp.recipe import DSparkRecipe

speculators = pytest.importorskip(
    "speculators.models.dspark", reason="speculators 0.9.0 is not installed", exc_type=ImportError
)


def their_model(config, ours, embedding):
    values = to_json(config, verifier="none", verifier_architectures=["Qwen3ForCausalLM"])
    values["speculators_config"]["verifier"]["name_or_path"] = None
    their_config = speculators.DSparkSpeculatorConfig.model_validate(values)
    their_config.transformer_layer_config._attn_implementation = "sdpa"
    model = speculators.DSparkDraftModel(their_config).eval()
    found = model.load_state_dict(ours.state_dict(), strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= {
        "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"
    }  # fmt: skip
    model.embed_tokens.weight.data.copy_(embedding)
    model.verifier_lm_head.weight.data.zero_()
    return model


@pytest.mark.parametrize(
    "layer_types",
    [("sliding_attention",) * 3, ("sliding_attention", "full_attention"), ("full_attention",)],
)
def test_logits_and_confidence_equal_theirs_in_float32(layer_types):
    config = tiny_config(layer_types=layer_types)
    ours = random_draft(config)
    num_tokens, size = 13, config.block_size
    anchors = torch.tensor([[2, 5, 6, 8]])
    ids, aux, embedding, blocks = random_inputs(config, 1, num_tokens, anchors)
    theirs = their_model(config, ours, embedding)
    mask = torch.zeros(1, num_tokens)
    mask[0, anchors[0]] = 1
    with torch.no_grad():
        hidden, logits, _, _, indices = theirs._backbone_forward(
            aux, ids, mask, torch.zeros(1, num_tokens, config.hidden_size),
            torch.zeros(1, num_tokens, dtype=torch.long), max_anchors=4,
        )  # fmt: skip
        assert torch.equal(indices.view(4, size)[:, 0], anchors[0])
        previous = ids[0, indices].view(4, size)
        bias = theirs.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=hidden.view(4, size, -1)
        )
        wanted = logits.view(4, size, -1) + bias
        features = torch.cat(
            [hidden.view(4, size, -1), theirs.markov_head.prev_embeddings(previous)], dim=-1
        )
        confidence = theirs.confidence_head(features)
        found = ours(aux, F.embedding(blocks, embedding), anchors)[0]
        torch.testing.assert_close(ours.logits(found, previous), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            ours.confidence(found, previous), confidence, rtol=1e-5, atol=1e-5
        )
        # A different theta is seen: the comparison reaches positions.
        other = random_draft(tiny_config(
            layer_types=layer_types, rope_parameters={"rope_type": "default", "rope_theta": 90.0}
        ))  # fmt: skip
        moved = other(aux, F.embedding(blocks, embedding), anchors)[0]
        assert (other.logits(moved, previous) - wanted).abs().max() > 1e-3


def test_past_the_window_the_trainer_and_the_engine_differ():
    """Theirs lets all slots see `sliding_window` tokens before the anchor; vLLM counts from the
    slot, itself included, and so do we (see mtp/dspark/model.py)."""
    config = tiny_config(layer_types=("sliding_attention",), sliding_window=5)
    ours = random_draft(config)
    anchors = torch.tensor([[8]])
    ids, aux, embedding, blocks = random_inputs(config, 1, 13, anchors)
    theirs = their_model(config, ours, embedding)
    mask = torch.zeros(1, 13)
    mask[0, 8] = 1
    with torch.no_grad():
        hidden = theirs._backbone_forward(
            aux, ids, mask, torch.zeros(1, 13, config.hidden_size),
            torch.zeros(1, 13, dtype=torch.long), max_anchors=1,
        )[0]  # fmt: skip
        found = ours(aux, F.embedding(blocks, embedding), anchors)[0]
    assert (hidden.view(4, -1) - found[0]).abs().max() > 1e-3


def test_their_defaults_are_ours():
    theirs, ours = speculators.DSparkSpeculatorConfig(), DSparkRecipe()
    for name in ("markov_rank", "block_size", "draft_vocab_size"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert theirs.sample_from_anchor
    assert theirs.markov_head_type == "vanilla"


def test_a_folder_loads_through_their_own_class_with_identical_logits(tmp_path, monkeypatch):
    """from_pretrained and all: schema, names, d2t and t2d, the base's embedding."""
    from training import write_training_base

    from graft.reader import Checkpoint
    from mtp.dspark.export import load_draft, save_draft
    from mtp.dspark.vocabulary import DraftVocabulary

    checkpoint = Checkpoint(write_training_base(tmp_path / "base"))
    recipe = DSparkRecipe(block_size=4, num_speculative_tokens=3, draft_vocab_size=10,
                          aux_layers=(1, 2), markov_rank=4, num_layers=2)  # fmt: skip
    config = config_for_base(checkpoint.text_config, recipe, 15)
    kept = torch.tensor([0, 1, 2, 4, 5, 7, 9, 11, 12, 15])
    vocabulary = DraftVocabulary(kept=kept, vocab_size=16)
    draft = tmp_path / "draft"
    draft.mkdir()
    save_draft(
        draft, config, random_draft(config).state_dict(), vocabulary, base=checkpoint,
        fingerprint={}, provenance={}, acceptance=None,
    )  # fmt: skip
    theirs = speculators.DSparkDraftModel.from_pretrained(draft).float().eval()
    assert theirs.config.sample_from_anchor and theirs.config.speculators_config is not None
    assert torch.equal(theirs.d2t, vocabulary.d2t) and torch.equal(theirs.t2d, vocabulary.t2d)
    embedding = checkpoint.load("model.embed_tokens.weight").float()
    assert torch.equal(theirs.embed_tokens.weight, embedding)
    ours, again = load_draft(draft)
    assert torch.equal(again.kept, kept)
    theirs._attn_impl = theirs.config.transformer_layer_config._attn_implementation = "sdpa"
    from torch.nn.attention.flex_attention import create_mask

    theirs._create_mask_fn = create_mask
    anchors = torch.tensor([[2, 5]])
    ids, aux, _, blocks = random_inputs(config, 1, 12, anchors)
    mask = torch.zeros(1, 12)
    mask[0, anchors[0]] = 1
    with torch.no_grad():
        hidden, logits, targets, _, _ = theirs._backbone_forward(
            aux, ids, mask, torch.ones(1, 12, config.hidden_size),
            torch.zeros(1, 12, dtype=torch.long), max_anchors=2,
        )  # fmt: skip
        found = ours.eval()(aux, F.embedding(blocks, embedding), anchors)[0]
        previous = ids[0, anchors[0, :, None] + torch.arange(4)]
        bias = theirs.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=hidden.view(2, 4, -1)
        )
    torch.testing.assert_close(
        ours.logits(found, previous), logits.view(2, 4, -1) + bias, rtol=1e-5, atol=1e-5
    )
    # Their teacher is the base's own output rows for these tokens.
    assert targets.shape[-1] == 10


def test_their_norm_is_another_than_the_base_has(tmp_path):
    """speculators 0.9.0 knows that the norm of qwen3_5 counts from 1, not that qwen3_5_moe's does:
    its targets for such a base are of another model. Ours come from the base itself."""
    from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES
    from training import write_training_base

    from graft.reader import Checkpoint
    from mtp.teacher.source import BaseEnds

    checkpoint = Checkpoint(write_training_base(tmp_path / "base"))
    assert checkpoint.text_config["model_type"] == "qwen3_5_moe_text"
    assert "qwen3_5_text" in GEMMA_STYLE_FINAL_NORM_MODEL_TYPES
    assert "qwen3_5_moe_text" not in GEMMA_STYLE_FINAL_NORM_MODEL_TYPES
    config = config_for_base(checkpoint.text_config, DSparkRecipe(aux_layers=(1, 2)), 15)
    values = to_json(config, verifier=str(tmp_path / "base"), verifier_architectures=[])
    values["draft_vocab_size"] = 16
    their_config = speculators.DSparkSpeculatorConfig.model_validate(values)
    their_config.transformer_layer_config._attn_implementation = "sdpa"
    theirs = speculators.DSparkDraftModel(their_config)
    theirs.load_verifier_weights()
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = theirs.verifier_norm(hidden)
    right = BaseEnds(checkpoint, device="cpu").final_norm(hidden)
    assert not torch.allclose(found, right, atol=0.1)
    weight = checkpoint.load("model.norm.weight").float()
    torch.testing.assert_close(found * (1 + weight) / weight, right, rtol=1e-4, atol=1e-4)


def test_the_table_is_their_metrics_where_both_count_the_same():
    """A draft of the whole vocabulary, every slot live but one block's last two: accept_len,
    rates, accuracy and confidence are those of their `compute_metrics`."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dspark.metrics import compute_metrics

    from mtp.dspark.evaluate import ForcedTable
    from mtp.dspark.loss import base_targets, slot_terms

    config = tiny_config(draft_vocab_size=24)
    model, size, num_blocks = random_draft(config), config.block_size, 5
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(num_blocks, size, config.hidden_size, generator=generator)
    base = torch.randn(num_blocks, size, config.hidden_size, generator=generator)
    lm_head = torch.randn(24, config.hidden_size, generator=generator)
    previous = torch.randint(0, 24, (num_blocks, size), generator=generator)
    live = torch.ones(num_blocks, size, dtype=torch.bool)
    live[3, 2:] = False
    with torch.no_grad():
        _, theirs = compute_metrics(
            model.logits(hidden, previous).view(1, -1, 24), (base @ lm_head.T).view(1, -1, 24),
            model.confidence(hidden, previous).view(1, -1), live.view(1, -1).float(), size,
            resolve_loss_config('{"tv": 1.0}', "eager"),
            tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0],
        )  # fmt: skip
        table = ForcedTable(size)
        positions = torch.arange(num_blocks * size).view(num_blocks, size)[live]
        terms = slot_terms(
            model, hidden[live], previous[live], base_targets(base.flatten(0, 1), lm_head),
            positions, lm_head, torch.arange(24),
        )  # fmt: skip
        table.add(terms, live)
    ours = table.as_dict()
    names = {
        "accept_len": "accept_len", "greedy_accept_len": "eal", "accept_rate": "accept_rate",
        "full_acc": "full_acc", "confidence_abs_error": "confidence_abs_error",
        "confidence_cumprod_bias": "confidence_cumprod_bias",
    }  # fmt: skip
    for name, other in names.items():
        wanted = float(theirs[f"{other}_sum"] / theirs[f"{other}_total"])
        assert ours[name] == pytest.approx(wanted, rel=1e-4), name
    assert ours["num_blocks"] == num_blocks
