"""The MTP head: K distinct decoder layers, chained over the whole window.

Module k at position i reads module k-1's hidden state at i (for k = 0 the base's hidden state
after its final norm) and the embedding of token i+k+1. It predicts token i+k+2. Positions stay i;
only the token ids shift. `fc`, the two input norms and `norm` are shared by all modules; the
embedding and `lm_head` are the base's and are not part of the head.

That is what vLLM's multi-module speculator executes when every step runs its own layer, so it is
what is trained. Source: vLLM `qwen3_5_mtp.py` and `multi_module_mtp/speculator.py`
(docs/serving.md tells the story).

The decoder layer itself is transformers' own, so that attention, router and experts are the
base's to the letter. Shapes below: B rows, T tokens, H hidden size, K modules.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graft.errors import UserError
from graft.formats import dequantize_head
from graft.layout import fuse_experts
from graft.manifest import (
    HeadFolder,
    base_fingerprint,
    fingerprint_differences,
    head_metadata,
    write_head,
)
from graft.reader import Checkpoint
from mtp.experts import EXPERTS
from mtp.norms import replace_norms
from mtp.recipe import Runtime
from mtp.repeated_layer import ATTENTION, RepeatedLayerCache, StepCache

# model_type -> transformers module and class prefix of its text decoder.
DECODERS = {
    "qwen3_5_moe_text": ("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5Moe"),
    "qwen3_5_text": ("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5"),
}


class MTPHead(nn.Module):
    """K MTP layers with shared input projection and norms.

    Args:
        text_config: the base's text configuration, as a dict from its config.json.
        num_layers: K.
        experts_implementation: name in transformers' table: ours is fast, "eager" is what
            modelopt can quantize, and what float64 needs.

    Raises:
        UserError: the base's model type has no decoder here.
    """

    def __init__(
        self,
        text_config: dict[str, Any],
        num_layers: int,
        experts_implementation: str = EXPERTS,
    ) -> None:
        super().__init__()
        model_type = str(text_config.get("model_type"))
        if model_type not in DECODERS:
            raise UserError(
                f"a base of type {' or '.join(DECODERS)}",
                f"model_type {model_type!r}",
                "choose a Qwen3.5-like base, or add its decoder to mtp/head.py",
            )
        module_name, prefix = DECODERS[model_type]
        modeling = importlib.import_module(module_name)
        self.text_config = copy.deepcopy(text_config)
        self.config = _layer_config(modeling, prefix, text_config, num_layers)
        self.config._experts_implementation = experts_implementation

        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        norm_class = getattr(modeling, f"{prefix}RMSNorm")
        layer_class = getattr(modeling, f"{prefix}DecoderLayer")
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = norm_class(hidden, eps=eps)
        self.pre_fc_norm_hidden = norm_class(hidden, eps=eps)
        self.layers = nn.ModuleList(layer_class(self.config, k) for k in range(num_layers))
        self._cache_keyword = cache_keyword(layer_class)
        self.activation_checkpointing = False  # recompute layers in the backward pass
        self.norm = norm_class(hidden, eps=eps)
        self.rotary_emb = getattr(modeling, f"{prefix}TextRotaryEmbedding")(self.config)
        replace_norms(self, norm_class)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def step(
        self,
        k: int,
        hidden: torch.Tensor,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        *,
        chain: StepCache | None = None,
    ) -> torch.Tensor:
        """Run module k over a window: [B, T, H] hidden and embeddings, [T] positions.

        Attention is causal: rows are padded on the right only. `chain` is for the steps of a layer
        that is repeated.

        Returns [B, T, H] after `norm`: what `lm_head` and module k+1 read.
        """
        # Embedding first: columns 0..H-1 of fc (vLLM concatenates in this order).
        joined = torch.cat(
            [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1
        )
        x = self.fc(joined)
        position_ids = positions.unsqueeze(0)
        # Three equal rows (time, height, width): transformers 5.17 does not expand them itself.
        rotary = self.rotary_emb(x, position_ids.expand(3, 1, -1))
        keywords = {self._cache_keyword: chain, "chain": chain} if chain else {}
        layer = functools.partial(
            self.layers[k],
            position_embeddings=rotary,
            attention_mask=None,
            position_ids=position_ids,
            **keywords,
        )
        if self.activation_checkpointing and torch.is_grad_enabled():
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        else:
            x = layer(x)
        return self.norm(x)

    def chains(
        self,
        runtime: Runtime,
        hidden: torch.Tensor,
        embeddings: torch.Tensor,
        num_steps: int | None = None,
    ) -> dict[str, list[torch.Tensor]]:
        """The chains that a runtime executes, by name; "both" shares their first step.

        Args:
            runtime: "routed" (`chain`), "stock" (`chain_stock`), or "both".
            hidden: [B, T, H] base hidden states after the final norm.
            embeddings: [B, T, H] base embeddings of the same tokens.
            num_steps: speculative steps; K when not given.
        """
        names = ("routed", "stock") if runtime == "both" else (runtime,)
        length = hidden.shape[1]
        if length < 2:
            return {name: [] for name in names}
        num_steps = num_steps or self.num_layers
        positions = torch.arange(length, device=hidden.device)
        cache = RepeatedLayerCache()
        kept = cache.at(0) if "stock" in names else None
        first = self.step(0, hidden[:, :-1], embeddings[:, 1:], positions[:-1], chain=kept)
        outputs = {}
        for name in names:
            outputs[name] = [first]
            for k in range(1, min(num_steps, length - 1)):
                window = length - 1 - k
                previous, following = outputs[name][-1][:, :window], embeddings[:, k + 1 :]
                if name == "stock":
                    output = self.step(
                        0, previous, following, positions[:window] + k, chain=cache.at(k)
                    )
                else:
                    output = self.step(k % self.num_layers, previous, following, positions[:window])
                outputs[name].append(output)
        return outputs

    def chain(
        self, hidden: torch.Tensor, embeddings: torch.Tensor, num_steps: int | None = None
    ) -> list[torch.Tensor]:
        """Run the modules one after the other over the whole window.

        Args:
            hidden: [B, T, H] base hidden states after the final norm.
            embeddings: [B, T, H] base embeddings of the same tokens.
            num_steps: speculative steps; more than K start again at layer 0 (`k % K`).

        Returns:
            One [B, T-1-k, H] tensor a step; element k at position i predicts token i+k+2. Step k
            is defined where token i+k+1 is known, hence the shorter windows.
        """
        return self.chains("routed", hidden, embeddings, num_steps)["routed"]

    def chain_stock(
        self, hidden: torch.Tensor, embeddings: torch.Tensor, num_steps: int | None = None
    ) -> list[torch.Tensor]:
        """What a stock vLLM runs instead: layer 0 at every step, one cache, all starts in parallel.

        Step 0 covers the window. Step k >= 1 is one token at position p+k for a start p: it reads
        its own previous output and the embedding of token p+k+1, and attends to step 0's keys up
        to p and to this start's own keys of steps 1..k. Source: vLLM `llm_base_proposer.py`.

        Args and returns are those of `chain`; element k at index p belongs to start p.
        """
        return self.chains("stock", hidden, embeddings, num_steps)["stock"]


def cache_keyword(module_class: type[nn.Module]) -> str:
    """Name of the cache argument: `past_key_values` up to transformers 5.2x, `cache` after."""
    parameters = inspect.signature(inspect.unwrap(module_class.forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _layer_config(modeling: Any, prefix: str, text_config: dict[str, Any], num_layers: int) -> Any:
    """The base's configuration, with K full-attention layers."""
    config_class = getattr(modeling, f"{prefix}TextConfig")
    fields = {k: v for k, v in text_config.items() if k not in ("model_type", "architectures")}
    fields["num_hidden_layers"] = num_layers
    fields["layer_types"] = ["full_attention"] * num_layers
    config = config_class(**fields)
    config._attn_implementation = ATTENTION
    return config


def save_head(
    head: MTPHead,
    folder: Path,
    *,
    base_fingerprint: dict[str, Any],
    provenance: dict[str, Any],
    acceptance: dict[str, Any] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write `head` as a head folder: BF16, experts fused. `weights` are instead of its own."""
    weights = head.state_dict() if weights is None else weights
    tensors = {f"mtp.{name}": tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    metadata = head_metadata(
        num_layers=head.num_layers,
        form="bf16-fused",
        text_config=head.text_config,
        base_fingerprint=base_fingerprint,
        provenance=provenance,
        acceptance=acceptance,
    )
    write_head(folder, tensors, metadata)


def open_head(folder: Path, base: Checkpoint) -> HeadFolder:
    """Open a head folder for use with `base`.

    Raises:
        UserError: no head folder, or a head that was trained on another base.
    """
    base.require_supported()
    source = HeadFolder(folder)
    trained_on = source.metadata["base_fingerprint"]
    if differences := fingerprint_differences(trained_on, base_fingerprint(base)):
        raise UserError(
            f"a head trained on {base.folder}", "; ".join(differences), "train one on this base"
        )
    return source


def load_head(folder: Path, experts_implementation: str = EXPERTS) -> MTPHead:
    """Read a head folder of any form into a float32 module; NVFP4 experts are dequantized.

    Raises:
        UserError: the folder is no head folder, or tensors are missing or left over.
    """
    source = HeadFolder(folder)
    head = MTPHead(source.metadata["text_config"], source.num_layers, experts_implementation)
    tensors = fuse_experts(dequantize_head(source.load_all()))
    state = {name.removeprefix("mtp."): tensor.float() for name, tensor in tensors.items()}
    missing = sorted(set(head.state_dict()) - set(state))
    extra = sorted(set(state) - set(head.state_dict()))
    if missing or extra:
        raise UserError(
            f"the tensors of a head of {head.num_layers} layers",
            f"missing {missing or 'none'}, left over {extra or 'none'} in {folder}",
            "write the head again with `mtp train` or `mtp quantize`",
        )
    head.float().load_state_dict(state, strict=True)
    return head
