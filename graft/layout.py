"""Names and shapes of the MTP head and of the few trunk tensors that it borrows.

The head of Qwen3.5 is `mtp.fc` and three norms shared by all layers, and K decoder layers with
full attention. Experts are stored either fused (`experts.gate_up_proj` [E, 2F, H], gate rows
first, no transpose) or one by one; both hold the same bytes, so one is a view of the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from graft.errors import UserError
from graft.reader import MAX_NAMED, Checkpoint

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Experts = Literal["fused", "per_expert"]
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TRUNK_PREFIXES = ("model.language_model.", "model.")
# Real bases have up to 512 experts and heads up to 4 layers: a larger number in a name or a config
# is a mistake or an attack, and lists as long as it says would fill the memory.
MAX_EXPERTS, MAX_HEAD_LAYERS, MAX_SIZE = 8192, 64, 2**24
_LAYER = re.compile(r"mtp\.layers\.(0|[1-9][0-9]{0,8})\.")
_ONE_EXPERT = re.compile(r"(.*\.experts)\.(0|[1-9][0-9]{0,8})\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, kw_only=True)
class BaseTensorNames:
    """What the head shares with the base. `lm_head` is None where embeddings are tied."""

    embed: str
    lm_head: str | None
    final_norm: str
    layer_prefix: str


def base_tensor_names(checkpoint: Checkpoint) -> BaseTensorNames:
    """Find the tensors that the head borrows, under either trunk prefix.

    Raises:
        UserError: embedding or final norm absent, or no `lm_head` in an untied base.
    """
    names = set(checkpoint.names)
    prefix = next((p for p in TRUNK_PREFIXES if f"{p}embed_tokens.weight" in names), None)
    if prefix is None or f"{prefix}norm.weight" not in names:
        raise UserError(
            f"embed_tokens.weight and norm.weight under model. or model.language_model. "
            f"in {checkpoint.folder}",
            "neither layout",
            "use a complete Hugging Face checkpoint",
        )
    lm_head = next((n for n in ("lm_head.weight", "lm_head.weight_packed") if n in names), None)
    if is_tied(checkpoint):
        lm_head = None
    elif lm_head is None:
        raise UserError(
            f"lm_head.weight in {checkpoint.folder} (tie_word_embeddings is not true)",
            "no such tensor in any shard",
            "use a complete checkpoint: the head's logits come from the base's lm_head",
        )
    return BaseTensorNames(
        embed=f"{prefix}embed_tokens.weight", lm_head=lm_head,
        final_norm=f"{prefix}norm.weight", layer_prefix=f"{prefix}layers.",
    )  # fmt: skip


def is_tied(checkpoint: Checkpoint) -> bool:
    """Whether logits use the embedding; the text config has the last word, as in vLLM."""
    outer = checkpoint.config.get("tie_word_embeddings", False)
    return bool(checkpoint.text_config.get("tie_word_embeddings", outer))


def count_key(config: Mapping[str, Any]) -> str:
    """The config key that holds the number of MTP layers for this family."""
    if config.get("model_type") == "qwen3_next":
        return "num_nextn_predict_layers"
    return "mtp_num_hidden_layers"


def count_head_layers(names: Iterable[str]) -> int:
    """Number of MTP layers that `names` speak of: the highest layer number plus one.

    Raises:
        UserError: for a number that no head has.
    """
    numbers = [int(found[1]) for name in names if (found := _LAYER.match(name))]
    count = max(numbers, default=-1) + 1
    if count > MAX_HEAD_LAYERS:
        raise UserError(
            f"at most {MAX_HEAD_LAYERS} MTP layers, numbered from 0",
            f"a tensor of mtp.layers.{count - 1}",
            "use a head whose layers are numbered 0, 1, 2, ...",
        )
    return count


def declared_layers(config: Mapping[str, Any]) -> int | None:
    """The number of MTP layers that a config.json states, as vLLM reads it; None for no word.

    Qwen3.5 keeps it in `text_config` where nested, but vLLM looks at the top level first. A
    Qwen3-Next config without the key means one layer.
    """
    key, nested = count_key(config), config.get("text_config") or {}
    value = config.get(key)
    value = nested.get(key) if value is None else value
    return 1 if value is None and key == "num_nextn_predict_layers" else value


def unrouted_layers(model_type: Any, num_layers: int) -> str | None:
    """What becomes of layers that no vLLM runs, for people; None where the plugin routes them.

    vLLM 0.32: `Qwen3NextMTP.forward` drops `spec_step_idx` and the plugin leaves that class alone;
    `use_multi_module_mtp` asks for `num_nextn_predict_layers > 1`, which is this family's own key.
    """
    if model_type != "qwen3_next" or num_layers < 2:
        return None
    return (
        f"no vLLM runs more than layer 0 of a Qwen3-Next head: {num_layers - 1} more are loaded, "
        "and Model Runner V2 then chains layer 0 over the window, which drafts worse than 1 layer"
    )


def has_experts(text_config: Mapping[str, Any], layer: int) -> bool:
    """Whether MTP layer number `layer` is a mixture of experts.

    In vLLM a Qwen3-Next MTP layer asks `mlp_only_layers` and `decoder_sparse_step` about its own
    number, from 0, as if it stood at the bottom of the trunk (`Qwen3NextDecoderLayer`). Qwen3.5
    does not read these keys.
    """
    if not is_moe(text_config) or text_config.get("model_type") != "qwen3_next":
        return is_moe(text_config)
    step = text_config.get("decoder_sparse_step") or 1
    return layer not in (text_config.get("mlp_only_layers") or []) and (layer + 1) % step == 0


def head_tensor_shapes(
    text_config: Mapping[str, Any], num_layers: int, experts: Experts = "fused"
) -> dict[str, Shape]:
    """Names and shapes of a complete unquantized head.

    Args:
        text_config: the base's language config.
        num_layers: MTP layers.
        experts: how routed experts are stored; ignored for a dense base.

    Raises:
        UserError: for a config that lacks a size.
    """
    hidden = _size(text_config, "hidden_size")
    shapes: dict[str, Shape] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
    }
    attention = _attention_shapes(text_config, hidden)
    for layer in range(num_layers):
        if has_experts(text_config, layer):
            mlp = _moe_shapes(text_config, hidden, experts)
        else:
            mlp = _mlp_shapes("mlp.", hidden, _size(text_config, "intermediate_size"))
        block = attention | mlp
        shapes |= {f"mtp.layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def is_moe(text_config: Mapping[str, Any]) -> bool:
    """Whether the base's MLPs are mixtures of experts."""
    return bool(text_config.get("num_experts"))


def _attention_shapes(config: Mapping[str, Any], hidden: int) -> dict[str, Shape]:
    head_dim = _size(config, "head_dim")
    width = _size(config, "num_attention_heads") * head_dim
    kv_width = _size(config, "num_key_value_heads") * head_dim
    gate = 2 if config.get("attn_output_gate", True) else 1
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (gate * width, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, width),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
    }


def _moe_shapes(config: Mapping[str, Any], hidden: int, experts: Experts) -> dict[str, Shape]:
    num_experts = _size(config, "num_experts", MAX_EXPERTS)
    width = _size(config, "moe_intermediate_size")
    shapes: dict[str, Shape] = {"mlp.gate.weight": (num_experts, hidden)}
    shared = config.get("shared_expert_intermediate_size") or 0
    if shared:
        shapes |= _mlp_shapes("mlp.shared_expert.", hidden, shared)
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    if experts == "fused":
        shapes["mlp.experts.gate_up_proj"] = (num_experts, 2 * width, hidden)
        shapes["mlp.experts.down_proj"] = (num_experts, hidden, width)
    else:
        for expert in range(num_experts):
            shapes |= _mlp_shapes(f"mlp.experts.{expert}.", hidden, width)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def _size(config: Mapping[str, Any], key: str, limit: int = MAX_SIZE) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value <= limit:
        raise UserError(f"{key} from 1 to {limit} in config.json", repr(value), "restore that file")
    return value


def fuse_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack per-expert weights into `experts.gate_up_proj` [E, 2F, H] and `experts.down_proj`.

    Tensors of any other name pass through. The exact inverse of `split_experts`.

    Raises:
        UserError: for an incomplete set of experts, naming what is missing.
    """
    import torch

    fused: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    num_parts: dict[str, int] = {}
    for name, tensor in tensors.items():
        if found := _ONE_EXPERT.fullmatch(name):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
            num_parts[found[1]] = num_parts.get(found[1], 0) + 1
        else:
            fused[name] = tensor
    for prefix, count in counts.items():
        names = (f"{prefix}.{e}.{p}.weight" for e in range(count) for p in EXPERT_PROJECTIONS)
        if num_parts[prefix] < count * len(EXPERT_PROJECTIONS):
            missing = [n for n in islice(names, MAX_EXPERTS) if n not in tensors]
            raise UserError(
                f"all {count} experts of {prefix}",
                f"{count * len(EXPERT_PROJECTIONS) - num_parts[prefix]} tensors missing: "
                f"{', '.join(missing[:MAX_NAMED])}",
                "use a complete head",
            )
        rows = [
            torch.cat([tensors[f"{prefix}.{e}.{p}.weight"] for p in ("gate_proj", "up_proj")])
            for e in range(count)
        ]
        fused[f"{prefix}.gate_up_proj"] = torch.stack(rows)
        fused[f"{prefix}.down_proj"] = torch.stack(
            [tensors[f"{prefix}.{e}.down_proj.weight"] for e in range(count)]
        )
    return fused


def split_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take fused experts apart, one weight each (views). The exact inverse of `fuse_experts`."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, projection = name.rpartition(".")
        if not prefix.endswith(".experts") or projection not in ("gate_up_proj", "down_proj"):
            split[name] = tensor
            continue
        for expert, weight in enumerate(tensor.unbind(0)):
            parts = {"down_proj": weight}
            if projection == "gate_up_proj":
                gate, up = weight.chunk(2, dim=0)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, value in parts.items():
                split[f"{prefix}.{expert}.{part}.weight"] = value
    return split
