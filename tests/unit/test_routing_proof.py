"""The routing proof on made-up counters, and its twin; real engines are in tests/vllm."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import write_base, write_tiny_head
from typer.testing import CliRunner

from graft.errors import UserError
from graft.formats import FORMS
from graft.manifest import file_digests
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.writer import write_graft
from mtp.acceptance import AcceptanceCounts
from mtp.cli import app
from mtp.serving import proof_prompts, routing_proof
from mtp.serving.routing_proof import judge, prove_routing, scrambled_twin


def measured(accepted, num_drafts=200, routed_layers=0):
    counts = AcceptanceCounts(len(accepted), num_drafts, list(accepted))
    return {"routed_layers": routed_layers, "outputs": [[1, 2], [3]], **counts.as_dict()}


GOOD = [170, 150, 130, 120]
CASES = [
    ("routed", GOOD, [160, 0, 0, 0], "position 2 accepts 75.0%"),
    ("routed", GOOD, [160, 3, 0, 0], "and 1.5% in the twin"),  # noise is right now and then
    ("routed", GOOD, [40, 0, 0, 0], "serve it"),  # other starts, another rate at position 1
    ("routed", [170, 150], [160, 0], "serve it"),
    ("layer 0 only", GOOD, GOOD, "changed not one counter"),
    ("layer 0 only", GOOD, [168, 149, 131, 118], "changed next to nothing"),  # ties of a GPU
    ("broken", [0, 0, 0, 0], [0, 0, 0, 0], "position 1 accepts 0.0%"),
    ("broken", [9, 5, 2, 1], [9, 0, 0, 0], "position 1 accepts 4.5%"),
    ("broken", [170, 2, 0, 0], [170, 0, 0, 0], "too little to compare"),
    ("broken", [170, 2, 0, 0], [170, 2, 0, 0], "too little to compare"),
    ("broken", GOOD, [2, 0, 0, 0], "it runs another layer"),
    ("broken", GOOD, [170, 150, 130, 0], "some positions run the scrambled layers"),
    ("broken", GOOD, [170, 40, 0, 0], "some positions run the scrambled layers"),
]


@pytest.mark.parametrize(("verdict", "original", "twin", "seen"), CASES)
def test_verdict(verdict, original, twin, seen):
    found, sentence = judge(measured(original), measured(twin))
    assert (found, seen in sentence) == (verdict, True), sentence


def test_nothing_drafted_is_broken():
    nothing = measured([0, 0], num_drafts=0)
    assert judge(nothing, nothing)[0] == "broken"


def test_the_advice_depends_on_what_the_plugin_says():
    assert "install mtp-graft" in judge(measured(GOOD), measured(GOOD))[1]
    claims = measured(GOOD, routed_layers=4)
    verdict, sentence = judge(claims, claims)
    assert verdict == "layer 0 only" and "report this" in sentence


def grafted_model(folder, num_layers=4, form="bf16-fused", **base):
    base_folder = write_base(folder / "base", **base)
    head = write_tiny_head(folder / "head", base_folder, num_layers=num_layers, form=form)
    return write_graft(plan_graft(base_folder, head), folder / "grafted").out


@pytest.fixture
def grafted(tmp_path):
    return grafted_model(tmp_path)


def state(folder):
    names = sorted(path.name for path in folder.iterdir())
    stats = {name: (folder / name).stat() for name in names}
    return file_digests(folder, names), {n: (s.st_ino, s.st_mtime_ns) for n, s in stats.items()}


def assert_only_later_norms_differ(original, twin, num_layers):
    original, twin = Checkpoint(original), Checkpoint(twin)
    assert original.names == twin.names and original.config == twin.config
    changed = {n for n in original.names if original.digest(n) != twin.digest(n)}
    assert changed == {f"mtp.layers.{k}.input_layernorm.weight" for k in range(1, num_layers)}
    for name in changed:
        noise = twin.load(name).float()
        assert noise.isfinite().all() and noise.std() > 30


@pytest.mark.parametrize("form", FORMS)
def test_a_twin_differs_in_the_later_layers_only(tmp_path, form):
    grafted = grafted_model(tmp_path, form=form)
    before = state(grafted), state(tmp_path / "base")
    with scrambled_twin(grafted) as twin:
        assert twin.parent == grafted.parent
        assert_only_later_norms_differ(grafted, twin, 4)
        written = [path.name for path in twin.iterdir() if not path.is_symlink()]
        assert written == [Checkpoint(grafted).info("mtp.norm.weight").shard.name]
        links = [path for path in twin.iterdir() if path.is_symlink()]
        assert len(links) > 3 and all(path.samefile(grafted / path.name) for path in links)
    assert (state(grafted), state(tmp_path / "base")) == before
    assert not twin.exists()


def test_twelve_layers_in_one_file_with_the_trunk_through_links(tmp_path):
    """As a hub cache keeps it: every file a link. Layers 10 and 11 are later ones, too."""
    folder = write_base(
        tmp_path / "real", num_shards=1, declared=12, head_layers=12, head_place="mixed"
    )
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    before = state(folder)
    with scrambled_twin(linked) as twin:
        assert_only_later_norms_differ(linked, twin, 12)
    assert state(folder) == before and all(path.is_symlink() for path in linked.iterdir())


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, UserError("a", "b", "c")])
def test_a_twin_is_removed_whatever_happens(grafted, monkeypatch, failure):
    def run_probe(python, runs):
        assert Path(runs[1]["checkpoint"]).is_dir()
        raise failure

    monkeypatch.setattr(routing_proof, "run_probe", run_probe)
    siblings, before = set(grafted.parent.iterdir()), state(grafted)
    with pytest.raises(failure if isinstance(failure, type) else type(failure)):
        prove_routing(grafted, [[1]], vllm_python=Path("python"))
    assert set(grafted.parent.iterdir()) == siblings and state(grafted) == before


def test_a_full_disk_is_a_users_error_and_leaves_nothing(grafted, monkeypatch):
    def copyfile(source, target):
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(routing_proof.shutil, "copyfile", copyfile)
    siblings = set(grafted.parent.iterdir())
    with pytest.raises(UserError, match=r"\d+ free bytes.*No space left"), scrambled_twin(grafted):
        pytest.fail("entered")
    assert set(grafted.parent.iterdir()) == siblings


@pytest.fixture
def engines(monkeypatch):
    """A vLLM that gives the twin these counters; holds what it was asked."""
    state = {"twin": [160, 0, 0, 0], "asked": None}

    def run_probe(python, runs):
        state["asked"] = runs
        assert all(torch.isfinite(Checkpoint(runs[1]["checkpoint"]).load(n)).all()
                   for n in ("mtp.norm.weight", "mtp.layers.3.input_layernorm.weight"))  # fmt: skip
        counters = (measured(GOOD, routed_layers=4), measured(state["twin"], routed_layers=4))
        results = [run | more for run, more in zip(runs, counters, strict=True)]
        return {"vllm_version": "0.0", "runs": results}

    monkeypatch.setattr(routing_proof, "run_probe", run_probe)
    return state


def test_asks_for_both_on_the_same_terms_and_leaves_routing_alone(grafted, engines):
    options = {"enforce_eager": True}
    proof = prove_routing(
        grafted, [[1, 2], [3]], vllm_python=Path("python"), num_tokens=7, engine_options=options
    )
    first, second = engines["asked"]
    assert Path(first.pop("checkpoint")) == grafted != Path(second.pop("checkpoint"))
    assert first.pop("name") != second.pop("name")
    assert first == second == {
        "prompts": [[1, 2], [3]], "num_speculative_tokens": 4, "max_tokens": 7, "routing": None,
        "ignore_eos": True, "engine_options": options,
    }  # fmt: skip
    assert (proof.verdict, proof.routed_layers, proof.same_tokens) == ("routed", 4, 2)
    assert "0.750" in proof.as_text() and "verdict: routed" in proof.as_text()
    restored = json.loads(json.dumps(proof.as_dict()))
    assert restored["schema_version"] == 1 and restored["twin"]["cumulative"][0] == 0.8
    assert math.isclose(restored["original"]["mean_accepted"], sum(GOOD) / 200)


@pytest.mark.parametrize(("layers", "advice"), [(0, "graft a head"), (1, "leave out --vllm")])
def test_without_later_layers_there_is_nothing_to_prove(tmp_path, layers, advice):
    folder = write_base(tmp_path / "base", declared=layers, head_layers=layers)
    with pytest.raises(UserError, match=advice):
        prove_routing(folder, [[1]], vllm_python=Path("python"))


@pytest.fixture
def words(grafted):
    """A tokenizer of a few words for the grafted model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = models.WordLevel({"the": 0, "head": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = Path(grafted, "tokenizer.json")
    path.unlink()
    tokenizer.save(str(path))
    (grafted / "graft.manifest.json").unlink()
    return grafted


def test_built_in_prompts_use_the_models_own_tokenizer(words):
    prompts = proof_prompts.proof_prompts(words, None)
    assert len(prompts) == len(proof_prompts.TEXTS) and all(prompts)
    assert {token for prompt in prompts for token in prompt} == {0, 1, 2}


def test_a_broken_tokenizer_is_a_users_error(grafted):
    with pytest.raises(UserError, match="pass --data"):
        proof_prompts.proof_prompts(grafted, None)


@pytest.mark.parametrize(
    ("twin", "code", "verdict"), [([160, 0, 0, 0], 0, "routed"), (GOOD, 1, "layer 0 only")]
)
def test_the_command_prints_both_and_exits_by_the_verdict(words, engines, twin, code, verdict):
    engines["twin"] = twin
    arguments = ["verify", str(words), "--vllm", "--vllm-python", "python"]
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == code
    assert text.output.index("files are sound") < text.output.index(f"verdict: {verdict}")
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert as_json.exit_code == code
    result = json.loads(as_json.output)
    assert result["ok"] and result["proof"]["verdict"] == verdict


def test_engine_options_reach_both_engines(words, engines):
    arguments = ["verify", str(words), "--vllm", "--vllm-python", "python", "--engine-options"]
    CliRunner().invoke(app, [*arguments, '{"tensor_parallel_size": 2}'])
    given = [run["engine_options"] for run in engines["asked"]]
    assert given == [{"tensor_parallel_size": 2}] * 2
    for wrong in ("[2]", "{"):
        result = CliRunner().invoke(app, [*arguments, wrong])
        assert isinstance(result.exception, UserError) and "JSON object" in str(result.exception)


def test_the_command_does_not_serve_a_checkpoint_that_failed(words, engines):
    config = json.loads((words / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 3
    (words / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["verify", str(words), "--vllm"])
    assert result.exit_code == 1 and engines["asked"] is None
    assert "vLLM was not started" in result.output
