"""Where a head starts: the base's own MTP layer, its last layer, an earlier head, or nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from graft.errors import UserError
from graft.formats import dequantize_head
from graft.layout import base_tensor_names, fuse_experts, head_tensor_shapes
from graft.reader import Checkpoint
from mtp.head import MTPHead, load_head


def require_warm_start(warm_start: str) -> None:
    """Refuse, before a base is loaded, what names neither a warm start nor a folder.

    Raises:
        UserError: it is misspelt, or the folder is not there.
    """
    if warm_start not in ("auto", "native", "last", "random") and not Path(warm_start).is_dir():
        raise UserError(
            "warm_start auto, native, last, random or a head folder",
            repr(warm_start),
            "correct the recipe",
        )


def head_from_base(base: Checkpoint, num_layers: int, warm_start: str = "auto") -> MTPHead:
    """A head to train, in float32, initialised from the base.

    Args:
        base: the base checkpoint; `mtp.*` is read from its files, since transformers drops it.
        num_layers: K.
        warm_start: "native" copies the base's own MTP layer 0 to all K; "last" copies the last
            full-attention layer, with `fc` passing embedding and hidden state on in equal
            parts; "random"; "auto" is "native" where there is one, else "last". Anything else is
            a head folder (`mtp head extract`), whose last layer also starts those it lacks.

    Raises:
        UserError: "native" was asked of a base that has no complete head, or the head folder is
            none, or of another size.
    """
    require_warm_start(warm_start)
    head = MTPHead(base.text_config, num_layers).float()
    if warm_start == "auto":
        warm_start = "native" if base.head_names else "last"
    if warm_start == "native":
        state = _native_state(base, num_layers)
        head.load_state_dict({k: v.float() for k, v in state.items()}, strict=True)
    elif warm_start == "last":
        _start_from_last_layer(head, base)
    elif warm_start == "random":
        _start_random(head)
    else:
        _start_from_folder(head, Path(warm_start))
    return head


def _native_state(base: Checkpoint, num_layers: int) -> dict[str, torch.Tensor]:
    """The base's MTP layer 0, repeated, in this module's names."""
    fused = fuse_experts({name: base.load(name) for name in base.head_names})
    wanted = head_tensor_shapes(base.text_config, 1)
    if missing := sorted(set(wanted) - set(fused)):
        raise UserError(
            f"a native MTP layer of {len(wanted)} tensors",
            f"no {', '.join(missing)}",
            "use warm_start = 'last'",
        )
    state = {}
    for name in wanted:
        short = name.removeprefix("mtp.")
        if short.startswith("layers.0."):
            for k in range(num_layers):
                state[short.replace("layers.0.", f"layers.{k}.", 1)] = fused[name]
        else:
            state[short] = fused[name]
    return state


def _start_from_last_layer(head: MTPHead, base: Checkpoint) -> None:
    """Copy the base's last full-attention layer to all K, and its final norm to `norm`."""
    names = base_tensor_names(base)
    types = base.text_config.get("layer_types") or []
    last = max((i for i, kind in enumerate(types) if kind == "full_attention"), default=None)
    if last is None:
        raise UserError(
            "a base with a full-attention layer",
            f"layer_types {types}",
            "use warm_start = 'random'",
        )
    prefix = f"{names.layer_prefix}{last}."
    source = {
        "mtp.layers.0." + n.removeprefix(prefix): base.load(n)
        for n in base.names
        if n.startswith(prefix)
    }
    fused = fuse_experts(dequantize_head(source))
    layer = {n.removeprefix("mtp.layers.0."): tensor.float() for n, tensor in fused.items()}
    for module in head.layers:
        module.load_state_dict(layer, strict=True)
    with torch.no_grad():
        eye = torch.eye(head.config.hidden_size)
        head.fc.weight.copy_(torch.cat([eye, eye], dim=1) / 2**0.5)
        head.norm.weight.copy_(base.load(names.final_norm).float())


def _start_from_folder(head: MTPHead, folder: Path) -> None:
    """Copy a head folder's layers, of any form; its last one stands for those that it lacks."""
    source = load_head(folder)
    given, last = source.state_dict(), source.num_layers - 1
    state = {}
    for name in head.state_dict():
        kind, _, rest = name.partition(".")
        if kind == "layers":
            number, _, part = rest.partition(".")
            state[name] = given[f"layers.{min(int(number), last)}.{part}"]
        else:
            state[name] = given[name]
    wrong = [name for name, own in head.state_dict().items() if own.shape != state[name].shape]
    if wrong:
        raise UserError(
            "a head folder of the base's sizes to start from",
            f"other shapes in {folder}: {', '.join(wrong[:5])}",
            "start from a head of this base, or with warm_start = 'last'",
        )
    head.load_state_dict(state, strict=True)


def _start_random(head: MTPHead) -> None:
    std = head.config.initializer_range
    for name, parameter in head.named_parameters():
        if "norm" in name.rsplit(".", 2)[-2]:
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=std)
