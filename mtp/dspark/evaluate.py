"""What vLLM will measure of a DSpark draft, and the table that the public trainer prints.

Free running: at every place where drafting could begin in the base's own greedy continuation, the
backbone runs with as many slots as are served, and the Markov head goes from left to right over the
draft's *own* tokens, as the engine does; `mtp.acceptance.replay` then verifies. That is the number
to choose a draft by.

Teacher forced: as speculators 0.9.0 defines its table (`models/dspark/metrics.py`): the Markov head
sees the true tokens, acceptance is 1 - TV, accept_len counts a bonus token. Two things differ, both
so that it is true: the base's whole vocabulary counts, and a slot is masked as its own target is.
Anchors are those of a fixed seed, or all.

Shapes: N blocks, S slots, T tokens, H hidden, A aux layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graft.manifest import file_digest
from graft.reader import Checkpoint
from mtp.acceptance import AcceptanceCounts, Continuations, continue_prompts, summarise
from mtp.data.prompts import evaluation_prompts
from mtp.data.store import load_prepared, require_tokenizer_of
from mtp.dspark.anchors import Blocks, choose_blocks
from mtp.dspark.export import WEIGHTS, load_draft, read_metadata
from mtp.dspark.loss import SlotTerms, base_targets, chunk_length, slot_terms
from mtp.dspark.model import DSparkModel
from mtp.dspark.vocabulary import DraftVocabulary
from mtp.progress import track
from mtp.recipe import Recipe
from mtp.teacher import Teacher
from mtp.teacher.source import HiddenSource

VALIDATION_SEED = 0  # of the anchors that are measured, the same at every evaluation
NUM_BINS = 10


@dataclass
class ForcedTable:
    """Sums over live slots, of B to a block."""

    block_size: int
    accepted: torch.Tensor = field(init=False)
    agreed: torch.Tensor = field(init=False)
    live: torch.Tensor = field(init=False)
    length: float = 0.0
    greedy_length: float = 0.0
    num_blocks: int = 0
    error: float = 0.0
    missed: float = 0.0
    bias: float = 0.0
    bins: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        zeros = torch.zeros(self.block_size, dtype=torch.float64)
        self.accepted, self.agreed, self.live = zeros.clone(), zeros.clone(), zeros.clone()
        self.bins = torch.zeros(NUM_BINS, 3, dtype=torch.float64)

    def add(self, terms: SlotTerms, live: torch.Tensor) -> None:
        """Count the blocks [N, B] whose live slots `terms` are, in order."""

        def spread(values: torch.Tensor) -> torch.Tensor:
            grid = torch.zeros(live.shape, dtype=torch.float64)
            grid[live] = values.detach().double().cpu()
            return grid

        accepted, agreed, sure = spread(1 - terms.tv), spread(terms.agrees), spread(terms.sure)
        self.accepted += accepted.sum(0)
        self.agreed += agreed.sum(0)
        self.live += live.sum(0)
        chances = accepted.cumprod(-1)
        alive = live.any(-1)
        self.length += float((1 + chances.sum(-1))[alive].sum())
        self.greedy_length += float((1 + agreed.cumprod(-1).sum(-1))[alive].sum())
        self.num_blocks += int(alive.sum())
        self.error += float((sure - accepted).abs()[live].sum())
        self.missed += float(terms.missed.double().sum())
        self.bias += float((sure.cumprod(-1) - chances)[live].sum())
        index = (sure[live] * NUM_BINS).long().clamp(max=NUM_BINS - 1)
        values = torch.stack([torch.ones_like(sure[live]), sure[live], accepted[live]], dim=-1)
        self.bins.index_add_(0, index, values)

    def as_dict(self) -> dict[str, Any]:
        """The reference's names; `calibration_error` is the mean gap of ten bins (ECE)."""
        slots = max(float(self.live.sum()), 1.0)
        per_position = self.live.clamp(min=1)
        gaps = (self.bins[:, 1] - self.bins[:, 2]).abs()
        filled = self.bins[:, 0].clamp(min=1)
        return {
            "num_blocks": self.num_blocks,
            "accept_len": self.length / max(self.num_blocks, 1),
            "greedy_accept_len": self.greedy_length / max(self.num_blocks, 1),
            "accept_rate": float(self.accepted.sum()) / slots,
            "full_acc": float(self.agreed.sum()) / slots,
            "position_acc": (self.agreed / per_position).tolist(),
            "position_accept_rate": (self.accepted / per_position).tolist(),
            "missed_mass": self.missed / slots,
            "confidence_abs_error": self.error / slots,
            "confidence_cumprod_bias": self.bias / slots,
            "calibration_error": float(gaps.sum()) / slots,
            "calibration": [
                {"slots": int(n), "confidence": float(sure / f), "accept_rate": float(got / f)}
                for (n, sure, got), f in zip(self.bins, filled, strict=True)
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What measuring a draft takes: the base's ends, the model, its vocabulary, S to a round."""

    source: HiddenSource
    model: DSparkModel
    vocabulary: DraftVocabulary
    num_slots: int

    def block_hidden(
        self, ids: torch.Tensor, aux: torch.Tensor, anchors: torch.Tensor, num_slots: int
    ) -> torch.Tensor:
        """[N, S, H] of blocks at anchors [N] of one row: ids [T], aux [T, A * H]."""
        blocks = torch.full((len(anchors), num_slots), self.model.config.mask_token_id)
        blocks[:, 0] = ids[anchors]
        dtype = self.model.fc.weight.dtype
        embeddings = self.source.embed(blocks[None]).to(dtype)
        with self.source.autocast():
            hidden = self.model(aux[None].to(dtype), embeddings, anchors[None])
        return hidden[0]

    @torch.no_grad()
    def drafts(self, ids: torch.Tensor, states: torch.Tensor, first: int) -> list[list[int]]:
        """Free-running drafts: element [k][p] guesses token p+k+2 when drafting starts at p.

        Args:
            ids: [T] prompt and continuation.
            states: [T, (A + 1) * H] the base's.
            first: the first start that matters; those before it hold -1.
        """
        device, hidden_size = self.source.device, self.model.config.hidden_size
        aux = states[:, :-hidden_size].to(device)
        anchors = torch.arange(first + 1, len(ids))
        hidden = self.block_hidden(ids, aux, anchors, self.num_slots)
        previous = ids[anchors].to(device)
        kept = self.vocabulary.kept.to(device)
        columns = []
        size = chunk_length(self.model.config.draft_vocab_size, device)
        for slot in range(self.num_slots):
            with self.source.autocast():
                chosen = [
                    self.model.logits(part, before).argmax(-1)
                    for part, before in zip(
                        hidden[:, slot].split(size), previous.split(size), strict=True
                    )
                ]
            previous = kept[torch.cat(chosen)]
            columns.append([-1] * first + previous.tolist())
        return columns

    @torch.no_grad()
    def forced(
        self, ids: torch.Tensor, states: torch.Tensor, blocks: Blocks, table: ForcedTable
    ) -> None:
        """Add one row's blocks to the table; `states` [T, (A + 1) * H], blocks of one row."""
        device, hidden_size = self.source.device, self.model.config.hidden_size
        live, anchors = blocks.live[0], blocks.anchors[0]
        if not live.any():
            return
        aux, final = states[:, :-hidden_size].to(device), states[:, -hidden_size:].to(device)
        hidden = self.block_hidden(ids, aux, anchors, live.shape[1])[live.to(device)]
        at = (anchors[:, None] + torch.arange(live.shape[1]))[live]
        lm_head = self.source.lm_head
        with self.source.autocast():
            terms = slot_terms(
                self.model, hidden, ids[at].to(device),
                base_targets(final.to(lm_head.dtype), lm_head), at.to(device),
                lm_head[self.vocabulary.kept.to(device)], self.vocabulary.draft_ids.to(device),
            )  # fmt: skip
        table.add(terms, live)


def measure(measured: Measured, text: Continuations) -> dict[str, Any]:
    """Acceptance on the base's own continuations, in the schema of the MTP head's.

    Also under "teacher_forced" the reference's table, with every token of the continuations up to
    the end of the reply as an anchor, as if these were its validation data.

    Raises:
        UserError: not one draft was made.
    """
    measured.model.eval()
    counts: list[AcceptanceCounts] = []
    table = ForcedTable(measured.model.config.block_size)
    texts = list(zip(text.prompts, text.continuations, text.states, strict=True))
    for prompt, continuation, states in track(
        texts, "replaying speculative decoding", unit="prompt"
    ):
        tokens, length = [*prompt.token_ids, *continuation], len(prompt.token_ids)
        ids = torch.tensor(tokens)
        drafts = measured.drafts(ids, states, length - 1)
        counts.append(text.replay(len(counts), drafts))
        mask = torch.arange(len(tokens)) >= length
        mask[length + _reply_length(continuation, text.end_tokens) :] = False
        measured.forced(ids, states, _all_blocks(measured, mask), table)
    metrics = summarise(text, counts, measured.num_slots, "dspark")
    return metrics | {"teacher_forced": table.as_dict()}


def validate(
    measured: Measured,
    rows: Iterable[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]],
    max_anchors: int,
) -> dict[str, Any]:
    """The reference's table on held-out rows: (number, ids [T], mask [T], states) of each."""
    table = ForcedTable(measured.model.config.block_size)
    for number, ids, mask, states in rows:
        blocks = choose_blocks(
            mask[None], torch.tensor([len(ids)]), [number],
            block_size=table.block_size, max_anchors=max_anchors, seed=VALIDATION_SEED,
        )  # fmt: skip
        measured.forced(ids, states, blocks, table)
    return table.as_dict()


def _reply_length(continuation: Sequence[int], end_tokens: frozenset[int]) -> int:
    """Tokens up to the first that ends the reply, itself included: the base is made to go on."""
    ends = (number for number, token in enumerate(continuation, 1) if token in end_tokens)
    return next(ends, len(continuation))


def _all_blocks(measured: Measured, mask: torch.Tensor) -> Blocks:
    size = measured.model.config.block_size
    return choose_blocks(
        mask[None], torch.tensor([len(mask)]), [0], block_size=size, max_anchors=0, seed=0
    )


def evaluate_folder(
    base: Path, folder: Path, data: Path, recipe: Recipe, *, device: str = "auto"
) -> dict[str, Any]:
    """`mtp eval --draft`: a draft's folder on held-out prompts, and on held-out rows.

    Args:
        base: the base that it is for.
        folder: of the draft.
        data: folder of `mtp data prepare`.
        recipe: [eval], and the number of rows in [dspark].
        device: "auto", "cpu", ...

    Raises:
        UserError: a broken folder, or a draft that was trained on another base.
    """
    model, vocabulary = load_draft(folder, Checkpoint(base))
    require_tokenizer_of(data, base)
    teacher = Teacher.load(base, device=device)
    trained = read_metadata(folder)["provenance"].get("recipe", {}).get("dspark", {})
    measured = Measured(
        source=teacher, model=model.to(teacher.device), vocabulary=vocabulary,
        num_slots=trained.get("num_speculative_tokens", model.config.block_size),
    )  # fmt: skip
    prompts = evaluation_prompts(
        data,
        num_prompts=recipe.eval.num_prompts,
        max_prompt_tokens=recipe.eval.max_prompt_tokens,
    )
    layers = model.config.aux_layers
    text = continue_prompts(teacher, prompts, recipe.eval.num_tokens, measured.num_slots, layers)
    metrics = measure(measured, text)
    held_out = load_prepared(data)["held_out"].with_format("numpy")
    held_out = held_out.select(range(min(recipe.dspark.eval_rows, len(held_out))))

    def rows() -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        for number, row in enumerate(held_out):
            ids = torch.from_numpy(row["input_ids"]).long()
            states = teacher.row_states([ids], layers)[0]
            yield number, ids, torch.from_numpy(row["loss_mask"]).bool(), states

    table = validate(measured, rows(), recipe.dspark.max_anchors)
    return metrics | {
        "validation": table | {"num_rows": len(held_out)},
        "draft_sha256": file_digest(folder / WEIGHTS),
    }
