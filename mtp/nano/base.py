"""Train the demo's small base on the spot: a real Qwen3.5-MoE, only small.

By default full attention in every layer, because vLLM's CPU build cannot speculate on
gated-delta-net layers; `recipes/hybrid` mixes both kinds, as the real models do.
Trained for a fixed number of steps, not seconds, so that the same seed gives the same base.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graft.errors import UserError
from graft.staging import check_output, staged_folder
from mtp.data.split import is_held_out
from mtp.nano.stdlib import code_files, stdlib_files, stdlib_root
from mtp.nano.tokenizer import END_OF_TEXT, build_tokenizer, render
from mtp.progress import track
from mtp.recipe import BaseRecipe
from mtp.teacher import pick_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_POSITIONS = 4096


@dataclass(frozen=True, kw_only=True)
class BaseReport:
    """What training the base took and gave."""

    steps: int
    first_loss: float
    final_loss: float
    num_parameters: int
    tokens_per_second: float
    seconds: float


def base_config(recipe: BaseRecipe, vocab_size: int, eos_token_id: int, pad_token_id: int) -> Any:
    """Configuration of the small base."""
    from transformers import Qwen3_5MoeTextConfig

    interval = recipe.full_attention_interval
    return Qwen3_5MoeTextConfig(
        vocab_size=-(-vocab_size // 64) * 64,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        layer_types=[
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(recipe.num_layers)
        ],
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.head_dim,
        linear_num_key_heads=recipe.num_key_value_heads,
        linear_num_value_heads=recipe.num_attention_heads,
        num_experts=recipe.num_experts,
        num_experts_per_tok=recipe.num_experts_per_tok,
        moe_intermediate_size=recipe.moe_intermediate_size,
        shared_expert_intermediate_size=recipe.moe_intermediate_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        # No mrope_section: a text-only model needs none, and with one vLLM 0.32 on a CPU gives the
        # drafter [3, N] positions for a rotary kernel that takes [N], and crashes.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def train_base(
    out: Path,
    *,
    traces: Path,
    code: Path | None = None,
    recipe: BaseRecipe | None = None,
    device: str = "auto",
    held_out_percent: int = 5,
    seed: int = 0,
    overwrite: bool = False,
) -> BaseReport:
    """Train and save a base with its tokenizer.

    Conversations and code files on the held-out side of `mtp.data.split` are never trained on.

    Args:
        out: folder to write: BF16 shards, index, configs, tokenizer, chat template.
        traces: JSONL as `record_traces` writes it.
        code: folder of Python files; the interpreter's standard library when None.
        recipe: sizes, steps, and rows a step; documents are packed back to back into rows.
        device: "auto", "cpu", "cuda", ...
        held_out_percent: as given to `mtp data prepare`.
        seed: decides weights and order; also the seed of the held-out split.
        overwrite: replace an existing `out`.

    Raises:
        UserError: unreadable traces, too little text, or an `out` that may not be written.
    """
    check_output(out, overwrite=overwrite, sources=[code] if code else [])
    conversations = _training_traces(traces, seed=seed, percent=held_out_percent)
    documents = _training_code(code, seed=seed, percent=held_out_percent)
    tokenizer, streams = _tokenize(conversations, documents)
    recipe = recipe or BaseRecipe()
    rows = [_rows(stream, recipe.row_length) for stream in streams]
    torch.manual_seed(seed)
    model = _new_model(recipe, tokenizer).to(pick_device(device))
    batches = _batches(rows, steps=recipe.steps, rows_per_step=recipe.rows_per_step, seed=seed)
    report = _optimize(model, batches, steps=recipe.steps, learning_rate=recipe.learning_rate)
    with staged_folder(
        out, overwrite=overwrite, sources=[code] if code else [], mark="config.json"
    ) as staging:
        save_base(model, tokenizer, staging)
    return report


def save_base(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save in BF16, in several shards as a large model would be, with the tokenizer."""
    # Not `model.to`: it would round the rotary frequencies too, which a reload keeps in FP32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config.update(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    size = sum(parameter.numel() * 2 for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // 3)
    tokenizer.save_pretrained(folder)


def _new_model(recipe: BaseRecipe, tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import Qwen3_5MoeForCausalLM

    config = base_config(recipe, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    model = Qwen3_5MoeForCausalLM._from_config(config, dtype=torch.float32)
    model.set_experts_implementation("grouped_mm")
    return model


def _training_traces(path: Path, *, seed: int, percent: int) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return [row for row in rows if not is_held_out(row["id"], seed=seed, percent=percent)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "a JSONL file of recorded conversations",
            f"{path}, which cannot be read ({error!r})",
            "record it again with `mtp nano traces`",
        ) from error


def _training_code(folder: Path | None, *, seed: int, percent: int) -> list[str]:
    # Ids as `mtp data prepare` gives them to the files of a folder.
    files = code_files(folder) if folder else stdlib_files()
    root, name = (folder, folder.resolve().name) if folder else (stdlib_root(), "stdlib")
    ids = {path: f"{name}/{path.relative_to(root).as_posix()}" for path in files}
    return [
        path.read_text(encoding="utf-8")
        for path, document_id in ids.items()
        if not is_held_out(document_id, seed=seed, percent=percent)
    ]


def _tokenize(
    conversations: list[dict[str, Any]], documents: list[str]
) -> tuple[PreTrainedTokenizerFast, list[torch.Tensor]]:
    """Train the tokenizer, then turn traces and code into one stream of ids (int64) each."""
    renderer = build_tokenizer([])
    rendered = [render(renderer, conversation) for conversation in conversations]
    tokenizer = build_tokenizer([*rendered, *documents], max_length=MAX_POSITIONS)
    backend, end = tokenizer.backend_tokenizer, tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    streams = []
    for texts in (rendered, documents):
        ids: list[int] = []
        for encoding in backend.encode_batch(texts, add_special_tokens=False):
            ids += [*encoding.ids, end]
        streams.append(torch.tensor(ids))
    return tokenizer, streams


def _rows(stream: torch.Tensor, row_length: int) -> torch.Tensor:
    num_rows = len(stream) // row_length
    if num_rows == 0:
        raise UserError(
            f"at least {row_length} tokens of traces and of code each",
            f"{len(stream)}",
            "record more conversations or name a larger folder of code",
        )
    return stream[: num_rows * row_length].view(num_rows, row_length)


def _batches(
    rows: list[torch.Tensor], *, steps: int, rows_per_step: int, seed: int
) -> Iterator[torch.Tensor]:
    """Yield [rows_per_step, row_length] ids, as many rows of each stream, epoch by epoch."""
    generator = torch.Generator().manual_seed(seed)
    per_stream = rows_per_step // len(rows)
    orders = []
    for stream in rows:
        num_epochs = -(-steps * per_stream // len(stream))
        epochs = [torch.randperm(len(stream), generator=generator) for _ in range(num_epochs)]
        orders.append(torch.cat(epochs))
    for step in range(steps):
        window = slice(step * per_stream, (step + 1) * per_stream)
        yield torch.cat([s[order[window]] for s, order in zip(rows, orders, strict=True)])


def _optimize(
    model: Any, batches: Iterator[torch.Tensor], *, steps: int, learning_rate: float
) -> BaseReport:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_then_cosine(steps))
    losses: list[torch.Tensor] = []
    num_tokens, started = 0, time.perf_counter()
    model.train()
    for ids in track(batches, "training the base", total=steps, unit="step"):
        ids = ids.to(model.device)
        # float32 weights; bfloat16 arithmetic on a GPU.
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type != "cpu"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        num_tokens += ids.numel()
    seconds = time.perf_counter() - started
    model.eval()
    last = losses[-max(1, steps // 20) :]
    return BaseReport(
        steps=steps,
        first_loss=float(losses[0]),
        final_loss=float(sum(last) / len(last)),
        num_parameters=sum(p.numel() for p in model.parameters()),
        tokens_per_second=num_tokens / seconds,
        seconds=seconds,
    )


def _warm_up_then_cosine(steps: int) -> Callable[[int], float]:
    warm_up = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.05 + 0.475 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    return factor
