"""What the restricted vocabulary costs in truth and gains in time.

    python benchmarks/losses/restricted.py --base build/nano/base --data build/nano/data \
        --head build/nano/head > OUT.jsonl

On the demo's base (`make demo`), for a head as training starts and as it ended: relative bias of
the loss, cosine and norm ratio of the gradient by the hidden states against the full one, share of
the vocabulary kept, and CPU time of both on the same batch in turn. Then the time alone at the real
vocabulary of 248,320, on random states whose distributions are about as sharp as a language
model's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from measure import cpu_seconds

from graft.reader import Checkpoint
from mtp.data.store import load_prepared
from mtp.head import load_head
from mtp.losses import AlignedTargets, Objective, align, chunked_loss
from mtp.losses.project import project
from mtp.losses.restricted import kept_tokens
from mtp.recipe import RestrictedVocabulary
from mtp.teacher import Teacher
from mtp.warm_start import head_from_base

NUM_STEPS = 4
TOP_P = (0.9, 0.99, 0.999)
TERMS = ("kl", "e2e_tv")


def loss_and_gradient(
    aligned: AlignedTargets,
    lm_head: torch.Tensor,
    objective: Objective,
    restricted: RestrictedVocabulary | None,
    chunk_size: int,
) -> tuple[float, torch.Tensor]:
    weights = torch.ones(NUM_STEPS) / NUM_STEPS
    student = aligned.student.detach().requires_grad_()
    aligned = AlignedTargets(**{**vars(aligned), "student": student})
    loss = chunked_loss(
        aligned, lm_head, objective, weights, restricted=restricted, chunk_size=chunk_size
    ).loss
    return loss.item(), torch.autograd.grad(loss, student)[0]


def compare(
    name: str,
    aligned: AlignedTargets,
    lm_head: torch.Tensor,
    term: str,
    top_p: float,
    *,
    chunk_size: int,
    repeats: int,
) -> None:
    """One line of JSON."""
    objective, restricted = Objective(**{term: 1.0}), RestrictedVocabulary(top_p=top_p)
    full_loss, full = loss_and_gradient(aligned, lm_head, objective, None, chunk_size)
    loss, gradient = loss_and_gradient(aligned, lm_head, objective, restricted, chunk_size)
    chunk = slice(0, chunk_size)
    kept = kept_tokens(
        aligned.student[:, chunk].detach(), project(aligned.teacher[chunk], lm_head),
        aligned.targets[chunk], lm_head, restricted,
    )  # fmt: skip
    seconds = [
        cpu_seconds(
            lambda r=r: loss_and_gradient(aligned, lm_head, objective, r, chunk_size), repeats
        )
        for r in (None, restricted)
    ]
    print(
        json.dumps(
            {
                "case": name, "term": term, "top_p": top_p, "chunk_size": chunk_size,
                "vocabulary": lm_head.shape[0], "kept_share": len(kept) / lm_head.shape[0],
                "full_loss": full_loss, "loss_bias": loss / full_loss - 1,
                "gradient_cosine": torch.cosine_similarity(
                    gradient.flatten(), full.flatten(), dim=0).item(),
                "gradient_norm_ratio": (gradient.norm() / full.norm()).item(),
                "full_cpu_seconds": seconds[0], "restricted_cpu_seconds": seconds[1],
                "time_ratio": seconds[1] / seconds[0],
            }
        ),
        flush=True,
    )  # fmt: skip


def real_case(teacher: Teacher, rows: list[dict], head: torch.nn.Module) -> AlignedTargets:
    """Rows of prepared data, padded, through base and head."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(row["input_ids"]) for row in rows], batch_first=True).long()
    mask = pad([torch.tensor(row["loss_mask"]) for row in rows], batch_first=True).bool()
    with torch.no_grad():
        hidden, embeddings = teacher.hidden(ids), teacher.embed(ids)
        outputs = head.chain(hidden, embeddings, NUM_STEPS)
    return align(outputs, hidden, ids, mask, NUM_STEPS)


def random_case(targets: int, size: int, vocabulary: int) -> tuple[AlignedTargets, torch.Tensor]:
    """Head states near the base's; logits of standard deviation 4, so that few tokens matter."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(targets, size, generator=generator)
    noise = torch.randn(NUM_STEPS, targets, size, generator=generator)
    lm_head = torch.randn(vocabulary, size, generator=generator) * 4 / size**0.5
    aligned = AlignedTargets(
        student=0.9 * teacher + 0.4 * noise,
        teacher=teacher,
        targets=(teacher @ lm_head.T).argmax(-1),
        valid=torch.ones(NUM_STEPS, targets, dtype=torch.bool),
        weights=torch.ones(targets),
        rows=torch.zeros(targets, dtype=torch.long),
        columns=torch.arange(targets) + 2,
    )
    return aligned, lm_head


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("base", "data", "head"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = Teacher.load(options.base, device="cpu")
    rows = load_prepared(options.data)["train"]
    rows = [rows[index] for index in range(0, len(rows), max(len(rows) // 2, 1))][:1]
    heads = {
        "warm start": head_from_base(Checkpoint(options.base), NUM_STEPS, "last"),
        "trained": load_head(options.head),
    }
    for name, head in heads.items():
        aligned = real_case(teacher, rows, head)
        for term in TERMS:
            for top_p in TOP_P:
                compare(name, aligned, teacher.lm_head, term, top_p, chunk_size=64, repeats=1)
    aligned, lm_head = random_case(64, 256, 248_320)
    for top_p in (0.99, 0.999):
        compare("random states", aligned, lm_head, "kl", top_p, chunk_size=32, repeats=1)


if __name__ == "__main__":
    main()
