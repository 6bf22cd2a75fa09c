"""Which side of the train / held-out split a conversation is on.

The answer depends on the conversation's id alone, never on the other rows: adding a source, a
filter or a window length cannot move a conversation from one side to the other, and all windows
of a conversation land together.
"""

from __future__ import annotations

import hashlib


def is_held_out(conversation_id: str, *, seed: int = 0, percent: int = 5) -> bool:
    """Whether a conversation is kept from training, for evaluation.

    Args:
        conversation_id: a stable id; the same for every window of the conversation.
        seed: changes which conversations are held out.
        percent: share held out, 0 to 100.
    """
    digest = hashlib.sha256(f"{seed}:{conversation_id}".encode()).hexdigest()
    return int(digest[:8], 16) % 100 < percent
