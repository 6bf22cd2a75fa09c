"""The small base: its tokenizer, its text, a few real steps, and what a reload gives."""

from __future__ import annotations

import json
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graft.errors import UserError
from mtp.data.split import is_held_out
from mtp.nano import base
from mtp.nano.agent import record_traces
from mtp.nano.stdlib import code_files, copy_stdlib, stdlib_files, stdlib_root
from mtp.nano.tokenizer import TAG_TOKENS, build_tokenizer, chat_template, render
from mtp.nano.workspace import TOOLS
from mtp.recipe import BaseRecipe

SHORT = BaseRecipe(steps=5, row_length=128)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Recorded traces and a small folder of code."""
    folder = tmp_path_factory.mktemp("inputs")
    record_traces(folder / "traces.jsonl", num_conversations=6, seed=0)
    copy_stdlib(folder / "stdlib", limit_bytes=150_000)
    return folder


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "base"
    report = base.train_base(out, recipe=SHORT, **sources(inputs))
    return out, report


def sources(inputs):
    return {"traces": inputs / "traces.jsonl", "code": inputs / "stdlib"}


@pytest.fixture(scope="module")
def tokenizer(trained):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(trained[0])


@given(st.text(max_size=60))
def test_round_trip_of_any_text(tokenizer, text):
    """As in Qwen3.5, text comes back in Unicode's composed form (NFC)."""
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_every_loader_gives_the_same_ids(trained, tokenizer):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    text = "def f(x=12): # nai\u0308ve 漢字\n\n    return x<|im_end|><think>\n"
    expected = Tokenizer.from_file(str(trained[0] / "tokenizer.json")).encode(text).ids
    assert tokenizer.encode(text) == expected
    assert PreTrainedTokenizerFast.from_pretrained(trained[0]).encode(text) == expected


@pytest.mark.parametrize("text", ["naïve – 漢字 🎉", "\tif x:\r\n    y  =  1\n\n", " 0x1F,  ٣"])
def test_round_trip_of_hard_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_markers_are_one_token_and_tags_are_not_special(tokenizer):
    for tag in TAG_TOKENS:
        [token_id] = tokenizer.encode(tag)
        assert tokenizer.decode([token_id], skip_special_tokens=True) == tag
    turn = tokenizer.encode("<|im_start|>user<|im_end|>")
    assert tokenizer.decode(turn, skip_special_tokens=True) == "user"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_the_template_is_saved_with_the_tokenizer(trained, tokenizer):
    assert (trained[0] / "chat_template.jinja").read_text(encoding="utf-8") == chat_template()
    row = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    assert "# Tools" in render(tokenizer, row)


def test_vocabulary_of_the_asked_size():
    tokenizer = build_tokenizer(
        [path.read_text("utf-8") for path in stdlib_files()[:6]], num_entries=700
    )
    assert len(tokenizer) == 700
    assert base.base_config(SHORT, len(tokenizer), 1, 0).vocab_size == 704


def test_training_lowers_the_loss_and_reports_it(trained):
    report = trained[1]
    assert report.steps == 5 and report.first_loss > 7
    assert report.final_loss < report.first_loss - 0.3
    assert report.tokens_per_second > 0


def test_saved_sharded_in_bf16(trained):
    from safetensors import safe_open

    index = json.loads((trained[0] / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) >= 3
    assert "lm_head.weight" in index["weight_map"]
    for shard in shards:
        with safe_open(trained[0] / shard, "pt") as stream:
            names = [name for name in stream.keys() if index["weight_map"][name] == shard]  # noqa: SIM118
            assert {stream.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    config = json.loads((trained[0] / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert config["dtype"] == "bfloat16" and not config["tie_word_embeddings"]
    assert "mrope_section" not in config["rope_parameters"]  # vLLM's CPU drafter crashes on it


def test_a_reload_reproduces_the_logits(inputs, tmp_path, tokenizer):
    """The model in memory after saving, and the one read back, agree to the bit."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = base._new_model(SHORT, tokenizer).eval()
    base.save_base(model, tokenizer, tmp_path)
    ids = torch.tensor([tokenizer.encode("def main():\n    return 1\n")])
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    again.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
        again.lm_head.weight[5] += 1
        assert not torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)


def test_generates_from_the_chat_template(trained, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trained[0])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where is wrap?"}],
        tools=TOOLS, add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    output = model.generate(**prompt, max_new_tokens=4)
    assert output.shape[1] > prompt["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_same_seed_same_weights(trained, inputs, tmp_path):
    base.train_base(tmp_path / "again", recipe=SHORT, **sources(inputs))
    shards = sorted(path.name for path in trained[0].glob("*.safetensors"))
    assert shards
    for shard in shards:
        assert (trained[0] / shard).read_bytes() == (tmp_path / "again" / shard).read_bytes()


def test_held_out_text_is_not_trained_on(tmp_path):
    code = tmp_path / "stdlib"
    code.mkdir()
    for number in range(60):
        (code / f"m{number}.py").write_text(f"# module {number}\n" + "x = 1\n" * 200)
    rows = [{"id": f"nano-agent/0/{n}", "messages": [], "tools": []} for n in range(60)]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = base._training_code(code, seed=7, percent=20)
    kept_code = {int(text.split("\n")[0].removeprefix("# module ")) for text in texts}
    kept = base._training_traces(tmp_path / "traces.jsonl", seed=7, percent=20)
    for number in range(60):
        held_out = is_held_out(f"stdlib/m{number}.py", seed=7, percent=20)
        assert (number in kept_code) != held_out
    expected = [row for row in rows if not is_held_out(row["id"], seed=7, percent=20)]
    assert kept == expected and 0 < len(kept) < 60 and 0 < len(kept_code) < 60


def test_only_an_own_copy_of_the_library_is_replaced(tmp_path):
    own = tmp_path / "code" / "mine.py"
    own.parent.mkdir()
    own.write_text("x = 1")
    with pytest.raises(UserError, match=r"mtp-nano-code to replace"):
        copy_stdlib(tmp_path / "code", limit_bytes=20_000, overwrite=True)
    assert own.read_text() == "x = 1"
    own.unlink()
    for _ in range(2):
        assert copy_stdlib(tmp_path / "code", limit_bytes=20_000, overwrite=True)


def test_ids_of_the_library_itself_are_those_of_its_copy(inputs):
    chosen = stdlib_files(limit_bytes=150_000)
    copied = code_files(inputs / "stdlib")
    assert [p.relative_to(stdlib_root()) for p in chosen] == [
        p.relative_to(inputs / "stdlib") for p in copied
    ]
    assert "PSF-2.0" in (inputs / "stdlib" / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "traces, complaint",
    [
        ("{broken", "a JSONL file of recorded conversations"),
        ('{"no": "id"}\n', "a JSONL file of recorded conversations"),
        (None, "a JSONL file of recorded conversations"),
        ("", "at least 128 tokens"),
    ],
)
def test_bad_traces_leave_nothing(inputs, tmp_path, traces, complaint):
    path = tmp_path / "traces.jsonl"
    if traces is not None:
        path.write_text(traces)
    with pytest.raises(UserError, match=complaint):
        base.train_base(tmp_path / "out", traces=path, code=inputs / "stdlib", recipe=SHORT)
    assert not (tmp_path / "out").exists()


def test_an_existing_base_is_kept(trained, inputs):
    with pytest.raises(UserError, match="--overwrite"):
        base.train_base(trained[0], **sources(inputs))


def test_a_hybrid_base_mixes_both_kinds_of_layers():
    config = base.base_config(BaseRecipe(num_layers=8, full_attention_interval=4), 700, 1, 0)
    assert config.layer_types == ([*["linear_attention"] * 3, "full_attention"] * 2)
