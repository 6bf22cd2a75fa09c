"""Which tokens are supervised: the traps of the public trainer, each with its own number."""

import itertools
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mtp.dspark.anchors import choose_blocks, possible_anchors, slot_mask
from mtp.dspark.vocabulary import DraftVocabulary, choose_vocabulary


def mask_of(text: str) -> torch.Tensor:
    return torch.tensor([[letter == "x" for letter in text]])


def blocks_of(text: str, *, length: int | None = None, max_anchors: int = 0, seed: int = 0, row=0):
    mask = mask_of(text)
    lengths = torch.tensor([length or len(text)])
    return choose_blocks(
        mask, lengths, [row], block_size=3, max_anchors=max_anchors, seed=seed
    )  # fmt: skip


def test_a_slot_has_the_mask_of_the_token_that_it_predicts():
    mask = mask_of("..xx.xxx..")
    found = slot_mask(mask, torch.tensor([[1, 2, 5]]), 3)[0]
    assert found.tolist() == [[True, True, False], [True, False, False], [True, True, False]]
    # The public trainer's, of the token before: an off-by-one that this would not pass.
    theirs = torch.stack([mask[0, p : p + 3] for p in (1, 2, 5)])
    assert theirs.tolist() != found.tolist()


def test_nothing_counts_after_a_reply_has_ended():
    """Token 5 is supervised, but a block at 2 would have to get past the end at 4."""
    assert slot_mask(mask_of("..xx.xxx.."), torch.tensor([[2]]), 3)[0, 0].tolist() == [
        True, False, False
    ]  # fmt: skip


def test_blocks_start_at_supervised_tokens_and_end_within_the_document():
    """The last three positions of the document start none, and padding never does."""
    blocks = blocks_of("..xxxxxxxx", length=9)
    assert blocks.anchors.tolist() == [[2, 3, 4, 5]]
    assert bool(blocks.live.all())
    assert blocks_of("..xxxxxxxx").anchors.tolist() == [[2, 3, 4, 5, 6]]
    # An anchor is followed by a supervised token: the last of a reply starts nothing.
    assert blocks_of(".xx..xx.....").anchors.tolist() == [[1, 5]]


def test_rows_are_documents_whatever_they_are_batched_with():
    mask = torch.cat([mask_of("xxxxxxxx"), mask_of("xxxxx...")])
    lengths = torch.tensor([8, 5])
    assert possible_anchors(mask, lengths, 3).sum(1).tolist() == [5, 2]
    both = choose_blocks(mask, lengths, [4, 9], block_size=3, max_anchors=2, seed=1)
    alone = choose_blocks(mask[:1], lengths[:1], [4], block_size=3, max_anchors=2, seed=1)
    assert torch.equal(both.anchors[:1], alone.anchors)
    assert both.anchors[1].tolist() == [0, 1]


def test_draws_follow_from_seed_and_row_alone():
    text = "x" * 40
    first = blocks_of(text, max_anchors=5, seed=3, row=7)
    assert torch.equal(first.anchors, blocks_of(text, max_anchors=5, seed=3, row=7).anchors)
    assert first.anchors[0].tolist() == sorted(set(first.anchors[0].tolist()))
    others = [
        blocks_of(text, max_anchors=5, **other).anchors
        for other in ({"seed": 4, "row": 7}, {"seed": 3, "row": 8})
    ]
    for one, other in itertools.combinations([first.anchors, *others], 2):
        assert not torch.equal(one, other)  # nor is one row's draw the next one's at another step


def test_rows_without_a_block_give_none_that_counts():
    blocks = blocks_of("..x..")
    assert blocks.anchors.shape == (1, 1)
    assert not blocks.live.any()


def test_the_vocabulary_keeps_the_frequent_and_fills_with_the_lowest_unseen():
    counts = np.array([0, 5, 0, 1, 5, 0, 2])
    assert choose_vocabulary(counts, 3).kept.tolist() == [1, 4, 6]
    vocabulary = choose_vocabulary(counts, 5)
    assert vocabulary.kept.tolist() == [0, 1, 3, 4, 6]
    assert vocabulary.d2t.tolist() == [0, 0, 1, 1, 2]
    assert vocabulary.t2d.tolist() == [True, True, False, True, True, False, True]
    assert vocabulary.draft_ids.tolist() == [0, 1, -1, 2, 3, -1, 4]
    again = DraftVocabulary.from_offsets(vocabulary.d2t, 7)
    assert torch.equal(again.kept, vocabulary.kept)
