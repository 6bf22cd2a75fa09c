"""A trained draft through speculators' own class: the same logits as here, on held-out text.

Needs speculators 0.9.0 on the path, which wants transformers up to 5.19:
    pip install --no-deps --target PKGS speculators==0.9.0 transformers==5.19.0 loguru openai ...
    PYTHONPATH=.:PKGS python benchmarks/dspark_nano/through_speculators.py DRAFT BASE DATA OUT.json
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from speculators.models.dspark import DSparkDraftModel
from torch.nn.attention.flex_attention import create_mask

from mtp.data.store import load_prepared
from mtp.dspark.export import load_draft
from mtp.teacher import Teacher

NUM_ROWS, NUM_ANCHORS, MAX_TOKENS = 8, 16, 256


def compare(theirs, ours, teacher: Teacher, ids: torch.Tensor) -> tuple[float, float, int]:
    """Largest difference of logits, largest logit, and disagreements of the argmax, over blocks."""
    config, size = ours.config, ours.config.hidden_size
    anchors = torch.linspace(0, len(ids) - config.block_size - 1, NUM_ANCHORS).long().unique()
    states = teacher.hidden(ids[None], config.aux_layers).float()
    aux, final = states[..., :-size], states[..., -size:]
    mask = torch.zeros(1, len(ids))
    mask[0, anchors] = 1
    hidden, logits, *_ = theirs._backbone_forward(
        aux, ids[None], mask, final, torch.zeros(1, len(ids), dtype=torch.long),
        max_anchors=len(anchors),
    )  # fmt: skip
    shape = (len(anchors), config.block_size, -1)
    previous = ids[anchors[:, None] + torch.arange(config.block_size)]
    bias = theirs.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden.view(shape))
    wanted = logits.view(shape) + bias
    blocks = torch.full((1, len(anchors), config.block_size), config.mask_token_id)
    blocks[0, :, 0] = ids[anchors]
    embeddings = F.embedding(blocks, theirs.embed_tokens.weight)
    found = ours.logits(ours(aux, embeddings, anchors[None])[0], previous)
    differ = int((found.argmax(-1) != wanted.argmax(-1)).sum())
    return float((found - wanted).abs().max()), float(wanted.abs().max()), differ


@torch.no_grad()
def main(draft: Path, base: Path, data: Path, out: Path) -> None:
    theirs = DSparkDraftModel.from_pretrained(draft).float().eval()
    theirs._attn_impl = theirs.config.transformer_layer_config._attn_implementation = "sdpa"
    theirs._create_mask_fn = create_mask
    ours, _ = load_draft(draft)
    teacher, num_blocks, differences = Teacher.load(base, device="cpu"), 0, []
    for row in load_prepared(data)["held_out"].select(range(NUM_ROWS)).with_format("torch"):
        ids = row["input_ids"].long()[:MAX_TOKENS]
        differences.append(compare(theirs, ours.eval(), teacher, ids))
        num_blocks += NUM_ANCHORS
    result = {
        "speculators": version("speculators"), "transformers": version("transformers"),
        "rows": len(differences), "blocks": num_blocks,
        "largest_difference": max(difference for difference, _, _ in differences),
        "largest_logit": max(logit for _, logit, _ in differences),
        "different_argmax": sum(count for *_, count in differences),
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
