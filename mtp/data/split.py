"""Which side of the train / held-out split a conversation is on.

A conversation without near-duplicates goes where its id says, whatever the other rows are: adding
a source, a filter or a window length cannot move it, and all its windows land together. A group
of near-duplicates goes as one, where the smallest digest among them says. A group that is larger
than the share to hold out is trained on, or it alone would be the held-out data.
"""

from __future__ import annotations

import hashlib

import numpy as np


def digest_of(conversation_id: str, seed: int) -> int:
    """64 bits that place a conversation."""
    digest = hashlib.sha256(f"{seed}:{conversation_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def is_held_out(conversation_id: str, *, seed: int = 0, percent: int = 5) -> bool:
    """Whether a conversation without near-duplicates is kept from training, for evaluation.

    Args:
        conversation_id: a stable id; the same for every window of the conversation.
        seed: changes which conversations are held out.
        percent: share held out, 0 to 100.
    """
    return (digest_of(conversation_id, seed) >> 32) % 100 < percent


def held_out_side(digests: np.ndarray, groups: np.ndarray, *, percent: int) -> np.ndarray:
    """[C] bool, whether each conversation is held out.

    Args:
        digests: [C] uint64, by `digest_of`.
        groups: [C] int64, the first member of each conversation's group.
        percent: share held out, 0 to 100.
    """
    smallest = digests.copy()
    np.minimum.at(smallest, groups, digests)
    sizes = np.bincount(groups, minlength=len(groups))
    largest = max(1, len(groups) * percent // 100)
    held_out = (smallest >> np.uint64(32)) % np.uint64(100) < percent
    return (held_out & (sizes <= largest))[groups]
