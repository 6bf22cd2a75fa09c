"""The terms of the loss, and what one token contributes to them, with gradients written out.

p is the base's distribution of the target token, q the head's, both softmax(logits / T). p is
constant. T holds in every term, and KL is not scaled by T^2 as Hinton's is: all terms scale alike.

| term   | of one token                        | source |
|--------|-------------------------------------|--------|
| ce     | -log q[token of the data]           | Gloeckle et al. 2024 (arXiv 2404.19737) |
| kl     | sum_v p (log p - log q)             | Hinton et al. 2015 (arXiv 1503.02531) |
| tv     | sum_v max(q - p, 0) = 1 - alpha     | Bebop (arXiv 2606.12370), eq. 10 |
| lk     | lambda KL + (1 - lambda) TV         | LK losses (arXiv 2602.23881), 4.2 and 4.4 |
| e2e_tv | 1/K sum_k (1 - prod_{j<=k} alpha_j) | Bebop, eq. 13; over the K tokens of one draft |

alpha = sum_v min(p, q) is the probability that a token drafted from q is accepted (Leviathan et
al., arXiv 2211.17192). `combine` defines lambda and the product.

Shapes: K steps, N targets of a chunk, V vocabulary (or the part of it that is looked at).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# What LK and end-to-end TV are made of: divergences whose factor is known only after all chunks.
DEFERRED = {"lk": ("kl", "tv"), "e2e_tv": ("tv",)}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Weights of the terms in the module's table, and what they depend on.

    temperature: T. lk_eta: eta in LK's lambda; 3 is the paper's best.
    """

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    lk: float = 0.0
    e2e_tv: float = 0.0
    temperature: float = 1.0
    lk_eta: float = 3.0

    @property
    def deferred(self) -> tuple[str, ...]:
        """Divergences whose gradient is kept apart, to be scaled once all chunks are known."""
        needed = {part for term, parts in DEFERRED.items() if getattr(self, term) for part in parts}
        return tuple(sorted(needed))

    @property
    def immediate(self) -> bool:
        """Whether a term has a factor that is known beforehand."""
        return bool(self.ce or self.kl or self.tv)


def token_terms(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    objective: Objective,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Divergences of each token, and their gradients by logits / T.

    With s = 1 where q > p: d CE = q - onehot(target), d KL = q - p, and d TV = q (s - sum_v q s).

    Args:
        logits: [K, N, V] float32 or float64.
        teacher_logits: [N, V], same type.
        targets: [N], indices into V.
        objective: which terms.

    Returns:
        Values, each [K, N]: "immediate", the sum of the terms whose factor is known, and those of
        `objective.deferred`. Their gradients, each [K, N, V]. And agreement, [K, N]: whether the
        two most probable tokens are the same.
    """
    deferred = objective.deferred
    agreement = logits.argmax(-1) == teacher_logits.argmax(-1)
    if objective.temperature != 1:
        logits, teacher_logits = (x / objective.temperature for x in (logits, teacher_logits))
    log_q = F.log_softmax(logits, dim=-1)
    log_p = F.log_softmax(teacher_logits, dim=-1)
    p = log_p.exp()
    values: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor] = {}

    index = targets.expand(log_q.shape[:-1]).unsqueeze(-1)
    total = log_q.new_zeros(log_q.shape[:-1])
    if objective.ce:
        total = total - objective.ce * log_q.gather(-1, index).squeeze(-1)
    if objective.kl or "kl" in deferred:
        kl = (p * log_p).sum(-1) - torch.einsum("nv,knv->kn", p, log_q)
        total = total + objective.kl * kl
        if "kl" in deferred:
            values["kl"] = kl
    q, by_tv = log_q.exp_(), None
    if objective.tv or "tv" in deferred:
        tv, by_tv = total_variation(q, p)
        total = total + objective.tv * tv
        if "tv" in deferred:
            values["tv"], gradients["tv"] = tv, by_tv
    if "kl" in deferred:
        gradients["kl"] = q - p
    if objective.immediate:
        values["immediate"] = total
        gradient = q.mul_(objective.ce + objective.kl)
        if objective.kl:
            gradient -= objective.kl * p
        if objective.ce:
            gradient.scatter_add_(-1, index, torch.full_like(index, -objective.ce, dtype=q.dtype))
        if objective.tv and by_tv is not None:
            gradient.add_(by_tv, alpha=objective.tv)
        gradients["immediate"] = gradient
    return values, gradients, agreement


def total_variation(q: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """TV [K, N] of q [K, N, V] and p [N, V], and its gradient [K, N, V] by q's logits / T."""
    excess = (q - p).relu_()
    value = excess.sum(-1)
    gradient = torch.mul(q, excess > 0)
    gradient.addcmul_(q, gradient.sum(-1, keepdim=True), value=-1)
    return value, gradient
