"""vLLM's own MTP class and weight loader on tiny grafts of every quantization: bytes arrive.

A CPU has no NVFP4 or FP8 kernels, so the choice of a kernel is stubbed and nothing runs: building
the modules, their parameters' names, shapes and dtypes, and the loading are vLLM's own. The config
object is respelled for the target class first, as an engine does before it builds the draft.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from safetensors.torch import load_file, save_file
from tiny import QUANTIZED, write_base, write_tiny_head

from graft.formats import NVFP4_PARTS
from graft.matching import NEVER_QUANTIZED
from graft.modules import linear_modules
from graft.plan import plan_graft
from graft.reader import Checkpoint
from graft.schemes import precision_problems
from graft.writer import write_graft

LAYOUT: dict[str, Any] = {
    "nested": False, "prefix": "model.",
    "text": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "head_dim": 32},
}  # fmt: skip
SHARDS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


def grafted(folder: Path, quantized: str | None, form: str, **text: Any) -> Path:
    layout = LAYOUT | {"text": LAYOUT["text"] | text}
    base = write_base(folder / "base", quantized=quantized, declared=1, **layout)
    head = write_tiny_head(folder / "head", base, form=form)
    return write_graft(plan_graft(base, head), folder / "out").out


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A world of one, as the modules ask for their rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with set_current_vllm_config(VllmConfig()):
        store = tmp_path_factory.mktemp("world") / "store"
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that builds and loads the draft model of a checkpoint."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as ct_moe,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as ct_linear,
    )
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import (
        configure_quant_config,
        get_model_architecture,
        initialize_model,
    )
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    monkeypatch.setattr(type(current_platform), "supported_quantization", [])
    backend = (NvFp4MoeBackend.MARLIN, None)
    for module in (modelopt, ct_moe):
        monkeypatch.setattr(module, "select_nvfp4_moe_backend", lambda **_: backend)
    for module in (modelopt, ct_linear):
        monkeypatch.setattr(module, "init_nvfp4_linear_kernel", lambda *_, **__: MagicMock())

    def build_and_load(folder: Path, target_too: bool | str = False) -> Any:
        config = EngineArgs(
            model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=128, load_format="safetensors",
            speculative_config={"method": "mtp", "num_speculative_tokens": 4},
        ).create_engine_config()  # fmt: skip
        draft = config.speculative_config.draft_model_config
        if config.quant_config is not None:
            record(config.quant_config, build_and_load.asked)
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            target, _ = get_model_architecture(config.model_config)
            if config.quant_config is not None:
                configure_quant_config(config.quant_config, target)
            if target_too:
                target = initialize_model(vllm_config=config, model_config=config.model_config)
                if target_too == "loaded":
                    loader = DefaultModelLoader(config.load_config)
                    loader.load_weights(target, config.model_config)
                    build_and_load.target = target
            model = initialize_model(vllm_config=config, model_config=draft)
            DefaultModelLoader(config.load_config).load_weights(model, draft)
        return model

    build_and_load.asked = []
    return build_and_load


def record(quant_config: Any, asked: list[tuple[str, str]]) -> None:
    """Note every module for which vLLM asks how it is quantized: its class and its name."""
    original = quant_config.get_quant_method

    def get_quant_method(layer: Any, prefix: str) -> Any:
        asked.append((type(layer).__name__, prefix))
        return original(layer, prefix)

    quant_config.get_quant_method = get_quant_method


def experts_of(model: Any, layer: int) -> Any:
    found = [m for m in model.model.layers[layer].modules() if type(m).__name__ == "RoutedExperts"]
    assert len(found) == 1
    return found[0]


def assert_bytes_arrived(folder: Path, model: Any, form: str) -> None:
    stored = Checkpoint(folder)
    weight, tensor_scale, input_scale, _ = NVFP4_PARTS.get(form, ("weight", None, None, ()))
    for layer in range(4):
        experts = experts_of(model, layer)
        prefix = f"mtp.layers.{layer}"
        for expert in range(4):
            for name, shards in SHARDS.items():
                parts = [f"{prefix}.mlp.experts.{expert}.{shard}" for shard in shards]
                matrices = [weight] + (["weight_scale"] if form in NVFP4_PARTS else [])
                for part in matrices:
                    wanted = torch.cat([stored.load(f"{p}.{part}") for p in parts])
                    found = getattr(experts, f"{name}_{part}")[expert]
                    assert found.dtype == wanted.dtype
                    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
                for part in filter(None, (tensor_scale, input_scale)):
                    wanted = torch.stack([stored.load(f"{p}.{part}").reshape(()) for p in parts])
                    found = getattr(experts, f"{name}_{part}")[expert].reshape(-1)
                    assert torch.equal(found.expand(len(parts)), wanted), (name, part)
        attention = model.model.layers[layer].self_attn
        wanted = torch.cat([stored.load(f"{prefix}.self_attn.{x}_proj.weight") for x in "qkv"])
        assert torch.equal(attention.qkv_proj.weight, wanted)
        gate = model.model.layers[layer].mlp.gate.weight
        assert torch.equal(gate, stored.load(f"{prefix}.mlp.gate.weight"))
    assert torch.equal(model.model.fc.weight, stored.load("mtp.fc.weight"))


@pytest.mark.parametrize("form", ["bf16-per-expert", "nvfp4-modelopt"])
@pytest.mark.parametrize("name", [None, *QUANTIZED])
def test_the_grafted_head_loads_and_its_bytes_arrive(tmp_path, load, name, form):
    folder = grafted(tmp_path, name, form)
    model = load(folder)
    written = json.loads((folder / "graft.manifest.json").read_text())["head"]["form"]
    assert_bytes_arrived(folder, model, written)
    kinds = {type(experts_of(model, layer).quant_method).__name__ for layer in range(4)}
    wanted = "Nvfp4" if "compressed" in written else "NvFp4"
    assert len(kinds) == 1
    assert (wanted if written in NVFP4_PARTS else "Unquantized") in kinds.pop()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_fused_bf16_head_loads_too(tmp_path, load, name):
    folder = grafted(tmp_path, name, "bf16-fused")
    model = load(folder)
    stored = Checkpoint(folder).load("mtp.layers.3.mlp.experts.gate_up_proj")
    assert torch.equal(experts_of(model, 3).w13_weight, stored)


def with_list(folder: Path, change: Any) -> None:
    for file, inner in (("config.json", "quantization_config"),
                        ("hf_quant_config.json", "quantization")):  # fmt: skip
        if not (folder / file).exists():
            continue
        value = json.loads((folder / file).read_text())
        if block := value.get(inner):
            for key in ("ignore", "exclude_modules", "modules_to_not_convert"):
                if key in block:
                    block[key] = change(block[key])
        (folder / file).write_text(json.dumps(value))


STATED = [name for name in QUANTIZED if name != "FP8 block"]


@pytest.mark.parametrize("name", STATED)
def test_bug_B7_nvfp4_experts_still_excluded_do_not_load(tmp_path, load, name):
    folder = grafted(tmp_path, name, "nvfp4-modelopt")
    entry = "re:^mtp.*" if "compressed" in name else "mtp*"
    with_list(folder, lambda entries: [*entries, entry])
    assert len(precision_problems(Checkpoint(folder))) >= 4
    with pytest.raises(Exception, match="has no parameter 'w"):
        load(folder)


@pytest.mark.parametrize("name", [n for n in QUANTIZED if "MIXED" not in n])
def test_bug_B2_bf16_experts_not_excluded_do_not_load(tmp_path, load, name):
    folder = grafted(tmp_path, name, "bf16-per-expert")
    with_list(folder, lambda entries: [e for e in entries if "mtp" not in e])
    assert len(precision_problems(Checkpoint(folder))) >= 4
    with pytest.raises(Exception):  # noqa: B017 - a shape, a name or an assertion, by method
        assert_bytes_arrived(folder, load(folder), "bf16-per-expert")


def test_bug_B9_missing_input_scales_load_silently_which_is_why_we_refuse_them(tmp_path, load):
    folder = grafted(tmp_path, "modelopt NVFP4", "nvfp4-modelopt")
    shard = folder / "model_mtp.safetensors"
    tensors = {n: t for n, t in load_file(shard).items() if not n.endswith(".input_scale")}
    save_file(tensors, shard, metadata={"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        n: s
        for n, s in index["weight_map"].items()
        if not (n.startswith("mtp") and n.endswith("input_scale"))
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(folder)


def test_bug_C6_compressed_tensors_without_config_groups_can_not_be_loaded(tmp_path, load):
    """Why `identify` refuses it: every layer is then built unquantized."""
    folder = grafted(tmp_path, "compressed-tensors W4A4", "nvfp4-modelopt")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["config_groups"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="weight"):
        load(folder)


@pytest.mark.parametrize("name", ["compressed-tensors W4A4", "FP8 block"])
def test_the_modules_that_we_judge_are_those_that_vllm_asks_about(tmp_path, load, name):
    kinds = ["linear_attention", "full_attention"]
    folder = grafted(tmp_path, name, "bf16-per-expert", layer_types=kinds)
    load(folder, target_too=name.startswith("compressed"))
    asked = {
        prefix for kind, prefix in load.asked if kind not in ("Attention", "VocabParallelEmbedding")
    }
    judged = {
        module.prefix
        for module in linear_modules(Checkpoint(folder).infos(), multimodal=False)
        if not module.prefix.endswith(NEVER_QUANTIZED)
    }
    if not name.startswith("compressed"):  # no FP8 kernels to build the target with
        judged = {prefix for prefix in judged if prefix.startswith(("mtp.", "lm_head"))}
    assert asked == judged
