"""Rows of the public bug log that no other file covers, and docs/bugs.md against all of them."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BASES, QUANTIZED, write_base, write_tiny_head
from typer.testing import CliRunner

from graft.index import INDEX_NAME
from graft.inspect import inspect_checkpoint
from graft.matching import ENGINE
from graft.modules import is_multimodal, linear_modules
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.schemes import SCHEMES, read_statement
from graft.verify import verify_graft
from graft.writer import write_graft
from mtp.cli import app
from mtp.head import MTPHead

ROOT = Path(__file__).parents[2]
HEAD_SHARD = "model_mtp.safetensors"


def graft(tmp_path, form="bf16-fused", **layout):
    base = write_base(tmp_path / "base", **layout)
    head = write_tiny_head(tmp_path / "head", base, form=form)
    return base, write_graft(plan_graft(base, head), tmp_path / "out").out


@pytest.mark.parametrize("name", [None, "compressed-tensors W4A4", "FP8 block"])
def test_bug_A7_a_fused_head_replaces_a_per_expert_one_whole(tmp_path, name):
    """Copied by prefix alone, the old experts would stay beside the new ones."""
    base, out = graft(
        tmp_path, declared=4, head_layers=4, head_form="bf16-per-expert", quantized=name,
        head_place="mixed",
    )  # fmt: skip
    old = {n for n in Checkpoint(base).head_names if ".experts." in n}
    assert len(old) == 4 * 4 * 3 and not old & set(Checkpoint(out).names)
    assert verify_graft(out, base).ok
    (out / "graft.manifest.json").unlink()
    shard, index = out / HEAD_SHARD, json.loads((out / INDEX_NAME).read_text())
    left = {name: torch.ones(16, 32, dtype=torch.bfloat16) for name in old}
    save_file(load_file(shard) | left, shard, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(old, HEAD_SHARD)
    (out / INDEX_NAME).write_text(json.dumps(index))
    assert any("does not belong" in failure for failure in verify_graft(out, base).failures)


def without_head(entries):
    return [entry for entry in entries if "mtp" not in entry]


def with_all_of_it(entries):
    return [*entries, "mtp.*"]


@pytest.mark.parametrize(
    ("form", "edit"), [("bf16-fused", without_head), ("nvfp4-modelopt", with_all_of_it)]
)
def test_bug_B5_inspect_says_for_which_engine_a_list_was_checked(tmp_path, form, edit):
    _, out = graft(tmp_path, form, quantized="modelopt NVFP4, config.json alone")
    sound = inspect_checkpoint(out)
    assert not sound.problems and sound.quantization_checked_for == ENGINE
    assert f"checked for {ENGINE}, no other engine" in sound.as_text()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"] = edit(config["quantization_config"]["ignore"])
    (out / "config.json").write_text(json.dumps(config))
    (problem,) = inspect_checkpoint(out).problems
    assert problem.severity == "error" and problem.what.endswith(f"as {ENGINE} reads it")
    assert any(line.startswith("mtp.layers.3.mlp.experts") for line in problem.details)
    answer = json.loads(CliRunner().invoke(app, ["inspect", str(out), "--json"]).stdout)
    assert answer["quantization_checked_for"] == ENGINE


def test_bug_B5_nothing_is_claimed_where_nothing_was_checked(tmp_path):
    base = write_base(tmp_path / "base")
    assert inspect_checkpoint(base).quantization_checked_for is None
    config = json.loads((base / "config.json").read_text())
    block = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (base / "config.json").write_text(json.dumps(config | block))
    unknown = inspect_checkpoint(base)
    assert unknown.quantization == "gptq 4" and unknown.quantization_checked_for is None
    assert "checked for" not in unknown.as_text()


def gates_outside_the_list(folder, keep=lambda entry: True):
    """Routers and shared gates of the head that the exclusion list, or a part of it, misses."""
    checkpoint = Checkpoint(folder)
    statement, multimodal = read_statement(checkpoint), is_multimodal(checkpoint.config)
    rules = SCHEMES[statement.name].rules(statement, multimodal)
    rules = rules.with_entries(filter(keep, statement.entries))
    gates = [
        module
        for module in linear_modules(checkpoint.infos(), multimodal)
        if module.is_head and module.prefix.endswith((".mlp.gate", ".shared_expert_gate"))
    ]
    assert len(gates) == 8
    return [module.prefix for module in gates if not rules.excludes(module)]


@pytest.mark.parametrize("name", QUANTIZED)
def test_bug_B11_router_and_shared_gate_are_in_every_list(tmp_path, name):
    """From a model with fused experts, as transformers 5 loads it. vLLM needs no such entry."""
    _, out = graft(tmp_path, "nvfp4-modelopt", quantized=name)
    assert gates_outside_the_list(out) == []
    assert len(gates_outside_the_list(out, lambda entry: "gate" not in entry)) >= 4


@pytest.mark.parametrize("layout", [row for row in BASES if "one-layer head" in row])
def test_bug_E3_the_head_is_alone_in_its_shard(tmp_path, layout):
    def mixed(folder):
        return [
            shard
            for shard, header in Checkpoint(folder).shards.items()
            if len({name.startswith("mtp.") for name in header}) == 2
        ]

    base, out = graft(tmp_path, **BASES[layout])
    assert mixed(out) == []
    assert {Checkpoint(out).info(n).shard.name for n in Checkpoint(out).head_names} == {HEAD_SHARD}
    assert bool(mixed(base)) == (BASES[layout].get("head_place") == "mixed")  # the check can fail


@pytest.fixture(scope="module")
def one_layer(random_base):
    torch.manual_seed(3)
    head = MTPHead(Checkpoint(random_base).text_config, 1).eval()
    for norm in (head.pre_fc_norm_embedding, head.pre_fc_norm_hidden):
        torch.nn.init.normal_(norm.weight, std=0.3)
    return head


def normed(x, norm):
    """RMS norm with a zero-centred weight, written out."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + norm.weight)


@torch.no_grad()
def test_bug_D2_the_embedding_comes_first(one_layer):
    """fc = [I|0] hands the layer the normed embedding; [0|I], the normed hidden state."""
    hidden, embeddings = torch.randn(2, 1, 5, 32)
    seen = []
    hook = one_layer.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    one, zero = torch.eye(32), torch.zeros(32, 32)
    for halves in ([one, zero], [zero, one]):
        one_layer.fc.weight.copy_(torch.cat(halves, dim=1))
        one_layer.step(0, hidden, embeddings, torch.arange(5))
    hook.remove()
    torch.testing.assert_close(seen[0], normed(embeddings, one_layer.pre_fc_norm_embedding))
    torch.testing.assert_close(seen[1], normed(hidden, one_layer.pre_fc_norm_hidden))
    assert (seen[0] - seen[1]).abs().max() > 0.1


@torch.no_grad()
def test_bug_D3_the_head_reads_hidden_states_after_the_final_norm(random_base):
    from transformers import AutoModelForCausalLM

    from mtp.teacher import Teacher

    teacher = Teacher.load(random_base, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(random_base, dtype=torch.float32).eval()
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    before: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    wanted = model(ids).logits.argmax(-1)
    hook.remove()
    found = model.lm_head(teacher.hidden(ids).float()).argmax(-1)
    assert (found == wanted).float().mean() > 0.9  # the teacher is BF16 here and there
    assert (model.lm_head(before[0]).argmax(-1) == wanted).float().mean() < 0.8


def undeclared(declared, package, imported):
    """What a dependency imports and does not declare, and neither do we."""
    theirs = importlib.metadata.requires(package) or []
    names = {re.split(r"[^\w.-]", line)[0].lower() for line in [*theirs, *declared]}
    return sorted(imported - names)


def test_bug_E6_what_modelopt_imports_undeclared_is_declared_here():
    folder = Path(importlib.util.find_spec("modelopt").origin).parent
    tree = ast.parse((folder / "torch" / "utils" / "dataset_utils.py").read_text())
    imported = {a.name for node in tree.body if isinstance(node, ast.Import) for a in node.names}
    assert "requests" in imported
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = undeclared(project["dependencies"], "nvidia-modelopt", {"requests"})
    assert found == []
    others = [line for line in project["dependencies"] if "requests" not in line]
    assert undeclared(others, "nvidia-modelopt", {"requests"}) == ["requests"]


def problems_of_page(page, tests):
    """Rows of docs/bugs.md without a test that exists, or whose test does not name the row."""
    problems = []
    for row, cell in re.findall(r"^\| ([A-G]\d+) \|.*\| ([^|]+) \|$", page, re.M):
        named = re.findall(r"`(test_\w+)`", cell)
        problems += [f"{row}: no test {name}" for name in named if name not in tests]
        bearing = [name for name in named if re.search(rf"_bugs?_(?:\w+_)?{row}(?:_|$)", name)]
        if row[0] in "ABCDEG" and not bearing and not cell.startswith(("open", "elsewhere")):
            problems.append(f"{row}: no test named after it")
    return problems


def test_every_row_of_the_bug_page_has_a_test_named_after_it():
    files = (ROOT / "tests").rglob("test_*.py")
    tests = {name for f in files for name in re.findall(r"^def (test_\w+)", f.read_text(), re.M)}
    page = (ROOT / "docs" / "bugs.md").read_text()
    rows = re.findall(r"^\| ([A-G]\d+) \|", page, re.M)
    numbers = {"A": 11, "B": 16, "C": 6, "D": 3, "E": 6, "F": 8, "G": 4}
    assert rows == [f"{letter}{n + 1}" for letter, last in numbers.items() for n in range(last)]
    assert problems_of_page(page, tests) == []
    bearing = {name for name in tests if re.search(r"_bugs?_[A-G]\d", name)}
    assert [name for name in sorted(bearing) if f"`{name}`" not in page] == []
    name = "test_bug_A7_a_fused_head_replaces_a_per_expert_one_whole"
    assert problems_of_page(page, tests - {name}) == [f"A7: no test {name}"]
    assert "A7: no test named after it" in problems_of_page(page.replace(name, "test_other"), tests)
