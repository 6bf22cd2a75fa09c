"""The draft's own release folder: what the card says, and which base it is for."""

import gzip
import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from dspark_tiny import tiny_config, write_draft
from training import write_training_base

from graft.errors import UserError
from graft.manifest import base_fingerprint, file_digest
from graft.reader import Checkpoint
from mtp.dspark.config import choose_mask_token, draft_rope
from mtp.dspark.config_json import from_json, to_json
from mtp.dspark.export import load_draft
from mtp.release.draft import build_draft_release, fingerprint_digest

EVALUATION = {
    "mean_accepted": 1.5, "cumulative": [0.8, 0.5, 0.2], "num_drafts": 9, "num_prompts": 4,
    "teacher_forced": {},
    "validation": {"num_rows": 3, "accept_len": 2.25, "accept_rate": 0.5, "calibration_error": 0.1},
}  # fmt: skip
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200_TABLE = RESULTS / "h200_2026-12-01c" / "dspark-table.json.gz"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_training_base(tmp_path_factory.mktemp("release") / "base")


def release(draft, base, out, evaluation=EVALUATION, **options):
    report = out.parent / "eval.json"
    report.write_text(json.dumps(evaluation))
    licence = out.parent / "LICENSE"
    licence.write_text("do as you like")
    return build_draft_release(
        draft, base, out, license_id="mit", license_file=licence, evaluation=report,
        **{"name": "me/draft", "base_name": "me/model"} | options,
    )  # fmt: skip


def test_the_folder_holds_the_draft_and_the_card_names_its_base(base, tmp_path):
    draft, out = write_draft(tmp_path / "draft", base), tmp_path / "out"
    files = release(draft, base, out)
    assert sorted(files) == sorted(path.name for path in out.iterdir())
    assert set(files) == {
        "LICENSE", "README.md", "SHA256SUMS", "config.json", "draft.json", "model.safetensors"
    }  # fmt: skip
    card = (out / "README.md").read_text()
    assert "does nothing alone" in card
    fingerprint = base_fingerprint(Checkpoint(base))
    assert fingerprint_digest(fingerprint) in card
    assert fingerprint["tensor_sha256"]["lm_head"] in card
    assert '"method": "dspark", "model": "me/draft", "num_speculative_tokens": 3' in card
    assert "vllm serve me/model " in card
    for number in ("1.500", "0.800", "2.250", "77 tokens", "MIT"):
        assert number in card
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "me/model"
    assert str(base.parent) not in "".join(
        path.read_text() for path in out.iterdir() if path.suffix != ".safetensors"
    )
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert file_digest(out / name) == digest
    load_draft(out, Checkpoint(base))


def test_a_release_for_another_base_is_refused(base, tmp_path):
    other = write_training_base(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    draft = write_draft(tmp_path / "draft", base)
    with pytest.raises(UserError, match="draft was trained on"):
        release(draft, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_reports_that_lack_something_or_are_of_other_weights_are_refused(base, tmp_path):
    draft = write_draft(tmp_path / "draft", base)
    for lacking in ("cumulative", "num_prompts", "mean_accepted", "teacher_forced"):
        report = {key: value for key, value in EVALUATION.items() if key != lacking}
        with pytest.raises(UserError, match=lacking):
            release(draft, base, tmp_path / "out", report)
    digest = file_digest(draft / "model.safetensors")
    with pytest.raises(UserError, match="of other weights"):
        release(draft, base, tmp_path / "out", EVALUATION | {"draft_sha256": "0" * 64})
    release(draft, base, tmp_path / "out", EVALUATION | {"draft_sha256": digest})


def test_the_table_of_an_h200_is_what_served_takes(base, tmp_path):
    """The raw report of a session; it is of other weights, and says so."""
    draft, served = write_draft(tmp_path / "draft", base), tmp_path / "served.json"
    report = json.loads(gzip.decompress(H200_TABLE.read_bytes()))
    served.write_text(json.dumps(report))
    with pytest.raises(UserError, match="of other weights"):
        release(draft, base, tmp_path / "out", served=served)
    found = report["variants"]["dspark"]
    found["predicted"]["draft_sha256"] = file_digest(draft / "model.safetensors")
    served.write_text(json.dumps(report))
    with pytest.raises(UserError, match="as many positions"):
        release(draft, base, tmp_path / "out", served=served)
    seven = EVALUATION | {"cumulative": [0.8, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1]}
    release(draft, base, tmp_path / "out", seven, served=served)
    assert "| served, vLLM 0.33.0 | 1.651 | 0.530 |" in (tmp_path / "out" / "README.md").read_text()
    report["variants"] = {"dspark-eager": found}
    served.write_text(json.dumps(report))
    release(draft, base, tmp_path / "eager", seven, served=served)
    for broken in (
        {"variants": report["variants"]},
        report | {"variants": None},
        report | {"variants": {"dspark": None}},
        report | {"variants": {"plain": {}}},
        report | {"variants": {"dspark": {"acceptance": {"mean_accepted": 1.0}}}},
    ):
        served.write_text(json.dumps(broken))
        with pytest.raises(UserError, match=r"a report (with|of)"):
            release(draft, base, tmp_path / "other", seven, served=served)


def test_the_serve_command_survives_a_shell(base, tmp_path):
    draft, out = write_draft(tmp_path / "draft", base), tmp_path / "out"
    release(draft, base, out, name="it's/mine", base_name="my base")
    (line,) = [x for x in (out / "README.md").read_text().splitlines() if "vllm serve" in x]
    _, _, name, _, speculative = shlex.split(line)
    assert name == "my base" and json.loads(speculative)["model"] == "it's/mine"


def test_a_config_json_reads_back_as_it_was_written(tmp_path):
    """No number is the same as another, or as a default: none may take another's place."""
    config = tiny_config(
        vocab_size=61, draft_vocab_size=59, hidden_size=48, intermediate_size=100,
        num_attention_heads=6, num_key_value_heads=3, head_dim=10, rms_norm_eps=3e-5,
        initializer_range=0.3, max_position_embeddings=77, sliding_window=33, block_size=5,
        aux_layers=(2, 7), mask_token_id=60, markov_rank=9,
    )  # fmt: skip
    values = to_json(config, verifier="base", verifier_architectures=["Qwen3_5MoeForCausalLM"])
    assert from_json(json.loads(json.dumps(values)), tmp_path) == config
    assert values["sample_from_anchor"] is True  # vLLM 0.33's own default is False


def test_the_rotary_rule_of_a_partial_base():
    """[11, 11, 10] at 0.25 of 256 fills the head as [44, 44, 40] (speculators#613)."""
    rope = {
        "rope_type": "default", "type": "mrope", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    }  # fmt: skip
    assert draft_rope({"rope_parameters": rope}, 256) == {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 1.0,
        "mrope_section": [44, 44, 40],
    }  # fmt: skip
    with pytest.raises(UserError, match="fills a head of 128"):
        draft_rope({"rope_parameters": rope}, 128)
    without = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert "partial_rotary_factor" not in draft_rope({"rope_parameters": without}, 64)
    with pytest.raises(UserError, match="rope_type default"):
        draft_rope({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, 64)


def test_the_mask_token_is_one_that_no_text_has(tmp_path):
    text = {"vocab_size": 10, "pad_token_id": 7, "eos_token_id": 8}
    tokenizer = {"model": {"vocab": {"a": 0, "b": 4}}, "added_tokens": [{"id": 5}]}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer))
    assert choose_mask_token(tmp_path, text) == 6
    assert choose_mask_token(tmp_path, text, 3) == 3
    tokenizer["added_tokens"].append({"id": 9})
    file.write_text(json.dumps(tokenizer))  # every embedding has a token
    assert choose_mask_token(tmp_path, text) == 7
    assert choose_mask_token(tmp_path, text | {"pad_token_id": None}) == 8
    for wrong, wanted in (({"vocab_size": 10}, 0), (text, 10)):
        with pytest.raises(UserError, match="mask token below 10"):
            choose_mask_token(tmp_path, wrong, wanted)
