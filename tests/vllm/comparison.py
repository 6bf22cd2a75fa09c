"""Every proposal of an engine against the chain in plain torch: what the parity tests count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from build_tiny import VOCABULARY
from reference import Draft, ReferenceChain

LENGTHS = (5, 9, 20, 40, 3, 60, 17, 33, 1, 2)
NEAR_TIE = 1e-3  # float32


def prompts(shared_prefix: int = 0, lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    """Random prompts of `lengths` tokens behind a shared random prefix."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(1, VOCABULARY, (shared_prefix,), generator=generator).tolist()
    return [
        {
            "prompt_token_ids": start
            + torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        }
        for length in lengths
    ]


class Comparison:
    """What came out of comparing every proposal of an engine with the reference.

    Args:
        reference: base and head of the checkpoint that was served.
        drafts: what the recorder noted.
        outputs: vLLM's outputs, with prompts.
        near_tie: a differing draft whose logit in the reference is less than this above the
            second best is a tie.
    """

    def __init__(
        self,
        reference: ReferenceChain,
        drafts: list[Draft],
        outputs: list[Any],
        near_tie: float = NEAR_TIE,
    ) -> None:
        num_steps = len(drafts[0].tokens)
        texts = {o.request_id: [*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs}
        hidden = {request: reference.hidden(tokens) for request, tokens in texts.items()}
        self.num_drafts = self.num_ties = self.num_wrong = 0
        self.accepted: Counter[int] = Counter()
        # Margin in the reference where a draft first differs, and of all drafted tokens.
        self.differing_margins: list[float] = []
        self.margins: list[float] = []
        for draft in drafts:
            # Inside the engine a request carries a random suffix.
            request = draft.request if draft.request in texts else draft.request.rsplit("-", 1)[0]
            tokens = texts[request]
            if draft.num_known >= len(tokens):
                continue
            wanted, margins = reference.drafts(
                tokens[: draft.num_known], hidden[request], num_steps
            )
            self.num_drafts += 1
            self.margins += margins
            if wanted != draft.tokens:
                first = [a == b for a, b in zip(wanted, draft.tokens, strict=True)].index(False)
                self.differing_margins.append(margins[first])
                if margins[first] < near_tie:
                    self.num_ties += 1
                else:
                    self.num_wrong += 1
            following = tokens[draft.num_known : draft.num_known + num_steps]
            if len(following) == num_steps:
                same = [a == b for a, b in zip(following, draft.tokens, strict=True)]
                self.accepted[([*same, False]).index(False)] += 1
        self.num_wrong_tokens = sum(
            _num_wrong_tokens(reference, hidden[o.request_id], o, near_tie) for o in outputs
        )


@torch.inference_mode()
def _num_wrong_tokens(
    reference: ReferenceChain, hidden: torch.Tensor, output: Any, near_tie: float
) -> int:
    """Generated tokens that the reference base, on the same text, would not have chosen."""
    start, tokens = len(output.prompt_token_ids) - 1, output.outputs[0].token_ids
    logits = reference.base.lm_head(hidden[0, start : start + len(tokens)])
    chosen = logits.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]
    return int((logits.amax(dim=1) - chosen >= near_tie).sum())
