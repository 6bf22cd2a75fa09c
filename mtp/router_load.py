"""How evenly a head's MoE routers spread tokens over experts, counted in passes that run anyway.

A few experts that take most tokens are slow to train and to serve, and a sign of a collapsed
router. The count is one `bincount` a layer and step, on the device; nothing is read back before it
is asked for. Padding counts too, as it is computed too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mtp.head import MTPHead

ROUTER = "mlp.gate"  # of a decoder layer; a dense layer has none


@dataclass(frozen=True)
class LayerLoad:
    """Routing of one MTP layer since the last reading.

    layer: 0-based.
    share: of the assignments, for each expert; sums to 1.
    variation: standard deviation / mean of the shares; 0 is perfectly even, and sqrt(E / k - 1)
        means that the same k of E experts take every token.
    """

    layer: int
    share: list[float]
    variation: float

    def unused(self) -> list[int]:
        """Experts that no token was sent to."""
        return [expert for expert, part in enumerate(self.share) if not part]


class RouterLoad:
    """Counts routing in all passes of a head from here on, until `remove`."""

    def __init__(self, head: MTPHead) -> None:
        self._counts: dict[int, torch.Tensor] = {}
        self._hooks = [
            router.register_forward_hook(self._counter(layer, router))
            for layer, router in routers(head).items()
        ]

    def _counter(self, layer: int, router: nn.Module):  # type: ignore[no-untyped-def]
        num_experts = router.weight.shape[0]

        def count(_module: nn.Module, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
            found = torch.bincount(outputs[-1].flatten(), minlength=num_experts)
            self._counts[layer] = self._counts.get(layer, 0) + found

        return count

    def read(self) -> list[LayerLoad]:
        """The load of each layer that ran since the last reading; none for dense layers."""
        counts, self._counts = self._counts, {}
        loads = []
        for layer, found in sorted(counts.items()):
            share = found.double() / found.sum()
            variation = (share.std(correction=0) / share.mean()).item()
            loads.append(LayerLoad(layer, share.tolist(), variation))
        return loads

    def remove(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()


def routers(head: MTPHead) -> dict[int, nn.Module]:
    """The router of each MoE layer."""
    return {
        k: layer.get_submodule(ROUTER)
        for k, layer in enumerate(head.layers)
        if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts")
    }


def freeze_routers(head: MTPHead) -> None:
    """Keep the routers as they are; experts still learn."""
    for router in routers(head).values():
        router.requires_grad_(False)
