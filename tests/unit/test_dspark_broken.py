"""Folders, data and recipes that cannot work: one clear error each, never a traceback."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from dspark_tiny import write_draft
from packed_bases import pack_base
from training import FEATURES, tiny_recipe, write_training_base, write_training_data

from graft.errors import UserError
from graft.reader import Checkpoint
from mtp.data.store import load_prepared
from mtp.dspark.anchors import require_blocks
from mtp.dspark.draft import DSparkDraft
from mtp.dspark.export import load_draft
from mtp.dspark.recipe import DSparkRecipe
from mtp.held_out import held_out_text
from mtp.schedule import StepBatches
from mtp.teacher import Teacher

LAYERS = "transformer_layer_config"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_training_base(tmp_path_factory.mktemp("broken") / "base")


@pytest.fixture
def draft(base, tmp_path):
    folder = write_draft(tmp_path / "draft", base)
    load_draft(folder, Checkpoint(base))
    return folder


def test_the_folder_of_a_head_is_no_draft(draft):
    (draft / "config.json").rename(draft / "head.json")
    with pytest.raises(UserError, match=r"found a head \(head.json\); .*--head"):
        load_draft(draft)


@pytest.mark.parametrize(
    ("where", "key", "value", "found"),
    [
        ("config.json", LAYERS, None, "another kind"),
        ("config.json", "block_size", "8", "block_size '8'"),
        ("config.json", "block_size", 0, "block_size 0"),
        ("config.json", "draft_vocab_size", None, "draft_vocab_size None"),
        ("config.json", "draft_vocab_size", 17, "draft_vocab_size 17 of 16"),
        ("config.json", "mask_token_id", 16, "mask_token_id 16 of 16"),
        ("config.json", "aux_hidden_state_layer_ids", [1, 7], "base layer 7"),
        ("config.json", "aux_hidden_state_layer_ids", [2, 2], "layer_ids"),
        ("config.json", "aux_hidden_state_layer_ids", [], "layer_ids"),
        ("config.json", "speculators_config", {"proposal_methods": []}, "another kind"),
        ("config.json", "enable_confidence_head", False, "False"),
        (LAYERS, "rope_parameters", {}, "no rope_theta"),
        (LAYERS, "rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn"}, "yarn"),
        (LAYERS, "layer_types", ["linear_attention"], "linear_attention"),
        (LAYERS, "num_key_value_heads", 0, "num_key_value_heads 0"),
        (LAYERS, "num_key_value_heads", 3, "in 3 groups"),
        (LAYERS, "hidden_size", 64, "hidden_size 64"),
        ("draft.json", "provenance", None, "another draft.json"),
        ("draft.json", "base_fingerprint", [], "another draft.json"),
        ("draft.json", "schema_version", 2, "another draft.json"),
    ],
)
def test_a_file_with_a_wrong_value_is_named(base, draft, where, key, value, found):
    path = draft / ("draft.json" if where == "draft.json" else "config.json")
    content = json.loads(path.read_text())
    part = content[LAYERS] if where == LAYERS else content
    assert key in part
    part[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=found) as caught:
        load_draft(draft, Checkpoint(base))
    assert str(draft) in str(caught.value) or "train one here" in str(caught.value)


@pytest.mark.parametrize("key", ["block_size", "speculators_config", LAYERS, "markov_rank"])
def test_a_config_without_a_key_is_named(draft, key):
    config = json.loads((draft / "config.json").read_text())
    del config[key]
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"no {key}"):
        load_draft(draft)


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("fc.weight", lambda t: t.fill_(float("nan")), "fc.weight that is not finite"),
        ("fc.weight", lambda t: t[:, :1].clone(), "size mismatch for fc.weight"),
        ("fc.weight", lambda t: None, 'Missing key.*"fc.weight"'),
        ("d2t", lambda t: None, "no d2t"),
        ("d2t", lambda t: t[:4].clone(), r"d2t of torch.int64 \[4\]"),
        ("d2t", lambda t: t.float(), "d2t of torch.float32"),
        ("d2t", lambda t: t + 4, "does not rise within 16"),
        ("d2t", lambda t: 3 - torch.arange(len(t)), "does not rise"),
        ("t2d", lambda t: ~t, "t2d of other tokens"),
    ],
)
def test_broken_weights_are_named(draft, name, change, found):
    path = draft / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    path.unlink()
    save_file({key: t for key, t in tensors.items() if t is not None}, path)
    with pytest.raises(UserError, match=found):
        load_draft(draft)


def rows_of(*texts):
    """A row for each text, in which x is a supervised token."""
    return Dataset.from_list(
        [
            {"input_ids": [1] * len(text), "loss_mask": [letter == "x" for letter in text],
             "category": "chat", "conversation_id": text, "source": "s"}
            for text in texts
        ],
        features=FEATURES,
    )  # fmt: skip


def test_data_in_which_no_block_can_start_is_refused():
    """Training on it would take all its steps and learn nothing."""
    for texts in ([".....", "..."], ["x.x.x.x.x"], [".xx..", "xxxx"]):
        with pytest.raises(UserError, match="none in"):
            require_blocks(rows_of(*texts), 4)
    require_blocks(rows_of("...", ".xx..."), 4)


def test_a_loss_of_nothing_is_refused():
    with pytest.raises(UserError, match="a term above 0"):
        DSparkRecipe(ce=0.0, tv=0.0, confidence=0.0)


def test_a_packed_base_teaches_what_its_values_do(base, tmp_path):
    """The loss on an NVFP4 base (its lm_head too) is that on a plain base of what the bytes mean;
    the plain base from before it was packed gives another."""
    packed, twin = tmp_path / "packed", tmp_path / "twin"
    pack_base(base, packed, twin, "modelopt mixed")
    weights = load_file(twin / "model.safetensors")
    save_file({name: t.float() for name, t in weights.items()}, twin / "model.safetensors")
    settings = DSparkRecipe(
        block_size=4, num_speculative_tokens=3, draft_vocab_size=10, aux_layers=(1, 2),
        markov_rank=4, num_layers=1, mask_token_id=15,
    )  # fmt: skip
    recipe = replace(tiny_recipe(draft="dspark"), dspark=settings)

    def loss(folder):
        data = write_training_data(tmp_path / f"data-{folder.name}", folder)
        teacher, rows = Teacher.load(folder, device="cpu"), load_prepared(data)["train"]
        text = held_out_text(teacher, folder, data, recipe)
        torch.manual_seed(0)
        draft = DSparkDraft.from_base(Checkpoint(folder), teacher, recipe, text, rows)
        (batch,) = StepBatches(rows, recipe.train).micro_batches(0)
        return float(draft(batch, draft.target_weights(batch), 0.0)[0].detach())

    assert loss(packed) == pytest.approx(loss(twin), rel=1e-3)
    assert loss(packed) != pytest.approx(loss(base), rel=1e-2)
