"""Does this vLLM have the code that the routing plugin touches, in the shape that it knows?

vLLM's sources are read, not imported: the answer comes in under a second, before any engine exists,
without initialising a device, and the same check runs on the unpacked wheel of any version. The
alternative, importing the modules and catching errors, would load half of vLLM into every process
that merely has the plugin installed.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

OLDEST, NEWEST = (0, 27), (0, 33)

MTP_MODEL = "model_executor/models/qwen3_5_mtp.py"
V1_PROPOSER = "v1/spec_decode/llm_base_proposer.py"
V2_SPECULATOR = "v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py"
V2_CHOICE = "v1/worker/gpu/spec_decode/__init__.py"

# File -> class.method -> parameters that are passed by name or position. Others need a default.
METHODS: dict[str, dict[str, str]] = {
    "config/speculative.py": {
        "SpeculativeConfig.hf_config_override": "hf_config",
        "SpeculativeConfig.use_multi_module_mtp": "self",
    },
    "v1/worker/worker_base.py": {
        "WorkerBase.__init__": "self vllm_config local_rank rank distributed_init_method",
        "WorkerBase.load_model": "self",
    },
    MTP_MODEL: {
        "Qwen3_5MultiTokenPredictor.forward": "self input_ids positions hidden_states"
        " intermediate_tensors inputs_embeds spec_step_idx",
        "Qwen3_5MTP.forward": "self input_ids positions hidden_states intermediate_tensors"
        " inputs_embeds",
    },
    V1_PROPOSER: {
        "SpecDecodeBaseProposer.propose": "self num_speculative_tokens target_token_ids"
        " target_positions target_hidden_states next_token_ids token_indices_to_sample"
        " common_attn_metadata sampling_metadata mm_embed_inputs num_rejected_tokens_gpu"
        " slot_mappings",
        "SpecDecodeBaseProposer.set_inputs_first_pass": "self target_token_ids next_token_ids"
        " target_positions target_hidden_states token_indices_to_sample cad"
        " num_rejected_tokens_gpu",
        "SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata": "self"
        " common_attn_metadata",
        "SpecDecodeBaseProposer._determine_batch_execution_and_padding": "self num_tokens"
        " use_cudagraphs",
        "SpecDecodeBaseProposer._get_slot_mapping": "self num_tokens slot_mapping",
        "SpecDecodeBaseProposer._get_positions": "self num_tokens",
        "SpecDecodeBaseProposer._sample_draft_tokens": "self hidden_states sampling_metadata",
    },
}
# File -> identifiers that must occur in it: attributes and fields that are read.
NAMES: dict[str, tuple[str, ...]] = {
    "compilation/decorators.py": ("do_not_compile",),
    V1_PROPOSER: ("eplb_state", "inputs_embeds", "supports_mm_inputs", "_last_draft_probs"),
    "v1/attention/backend.py": ("seq_lens", "slot_mapping", "block_table_tensor", "num_reqs"),
    "v1/worker/gpu_model_runner.py": ("drafter", "discard_request_mask", "input_batch", "requests"),
    "v1/worker/gpu_input_batch.py": (
        "num_computed_tokens_cpu", "token_ids_cpu", "num_tokens_no_spec", "req_ids",
    ),
    V2_SPECULATOR: ("MultiModuleMTPSpeculator", "spec_step_idx"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found in one vLLM.

    Attributes:
        problems: why it is not known; empty when it is.
        passes_index: its Qwen3.5 wrapper already passes `spec_step_idx` on.
        wires_v2: Model Runner V2 can choose the multi-module speculator (0.28 and later).
    """

    problems: tuple[str, ...]
    passes_index: bool
    wires_v2: bool


def survey(package: Path, version: str) -> Survey:
    """Look at the vLLM whose package folder is `package` (the folder of `vllm/__init__.py`)."""
    problems = []
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        problems.append(f"version {version} is outside {_dotted(OLDEST)} to {_dotted(NEWEST)}")
    for file in sorted(METHODS.keys() | NAMES.keys()):
        tree = _parse(package / file)
        if tree is None:
            problems.append(f"vllm/{file} is missing")
            continue
        for method, parameters in METHODS.get(file, {}).items():
            problems += _method_problems(tree, file, method, parameters.split())
        absent = [name for name in NAMES.get(file, ()) if name not in _identifiers(tree)]
        problems += [f"vllm/{file} has no {name}" for name in absent]
    model, choice = _parse(package / MTP_MODEL), _parse(package / V2_CHOICE)
    wrapper = _method(model, "Qwen3_5MTP.forward") if model else None
    return Survey(
        problems=tuple(problems),
        passes_index=wrapper is not None and "spec_step_idx" in _identifiers(wrapper),
        wires_v2=choice is not None and "MultiModuleMTPSpeculator" in _identifiers(choice),
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _parse(path: Path) -> ast.Module | None:
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def _method(tree: ast.Module, dotted: str) -> ast.FunctionDef | None:
    class_name, method_name = dotted.split(".")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == method_name:
                    return item
    return None


def _method_problems(tree: ast.Module, file: str, dotted: str, wanted: list[str]) -> list[str]:
    method = _method(tree, dotted)
    if method is None:
        return [f"vllm/{file} has no {dotted}"]
    arguments = method.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    keyword_only = [a.arg for a in arguments.kwonlyargs]
    missing = [name for name in wanted if name not in (*positional, *keyword_only)]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [
        name
        for name, default in zip(keyword_only, arguments.kw_defaults, strict=True)
        if default is None
    ]
    unknown = [name for name in required if name not in wanted]
    if missing or unknown:
        return [
            f"{dotted} in vllm/{file} takes ({', '.join(positional + keyword_only)}), not"
            f" ({', '.join(wanted)})"
        ]
    return []


def _identifiers(tree: ast.AST) -> set[str]:
    """Every name, attribute, parameter, keyword, class and string constant below `tree`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "value"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                names.add(value)
    return names
