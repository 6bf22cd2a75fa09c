"""A part of the vocabulary for a chunk of targets: faster losses, and biased ones.

Most of the vocabulary has no probability worth a gradient at any target of a chunk. Kept are: each
target's most probable tokens of the base, up to a share `top_p` of its probability; the tokens of
the data; and the tokens that the head itself favours, since those that only the head favours are
what it must unlearn. Base and head are both normalised over what is kept.

The base's logits are still needed in full, once a target; the head's own favourites are looked up
at every n-th target of a chunk only, which is the approximation besides the cut-off. With a share
r of the vocabulary kept, 1 + K/n + 2 K r products of the vocabulary's size take the place of
1 + 2 K. What the head favours wrongly between the looked-up targets goes unpunished: that is the
bias, and the reason why this is off by default.

Shapes: K steps, N targets of a chunk, H hidden size, V vocabulary, M tokens kept.
"""

from __future__ import annotations

import torch

from mtp.losses.project import project
from mtp.recipe import RestrictedVocabulary

# Tokens of the base a target keeps at most: a flat distribution has no small top-p set.
MOST_TOKENS = 512


def kept_tokens(
    student: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    lm_head: torch.Tensor,
    restricted: RestrictedVocabulary,
) -> torch.Tensor:
    """Token ids that a chunk looks at, ascending: [M] int64.

    Args:
        student: [K, N, H].
        teacher_logits: [N, V].
        targets: [N].
        lm_head: [V, H].
        restricted: how much is kept.
    """
    vocabulary = lm_head.shape[0]
    top, tokens = teacher_logits.softmax(-1).topk(min(MOST_TOKENS, vocabulary))
    # A token stays while those before it have not reached top_p.
    before = top.cumsum(-1) - top
    kept = [tokens[before < restricted.top_p], targets]
    probed = project(student[:, :: restricted.probe_every], lm_head)
    kept.append(probed.topk(min(restricted.favourites, vocabulary)).indices.flatten())
    return torch.cat(kept).unique()
