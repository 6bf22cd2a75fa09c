"""A base and data on which training takes a second: two full-attention layers, random tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, List, Value

sys.path.insert(0, str(Path(__file__).parent))
from random_bases import save_random_base

from graft.manifest import file_digest
from mtp.data.store import load_prepared, write_manifest
from mtp.recipe import EvalRecipe, HeadRecipe, Recipe, TrainRecipe

FEATURES = Features(
    input_ids=List(Value("int32")),
    loss_mask=List(Value("bool")),
    category=Value("string"),
    conversation_id=Value("string"),
    source=Value("string"),
)


def write_training_base(folder: Path, *, seed: int = 0) -> Path:
    """A base of 16 words, so that random drafts are sometimes right."""
    save_random_base(folder, vocab_size=16, layer_types=["full_attention"] * 2, seed=seed)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_training_data(folder: Path, base: Path, *, num_rows: int = 24, seed: int = 0) -> Path:
    """A prepared folder of random rows of 3 to 40 tokens, a third of each supervised."""
    generator = np.random.default_rng(seed)

    def row(split: str, number: int) -> dict[str, Any]:
        length = int(generator.integers(3, 41)) if split == "train" else 40
        num_supervised = max(length // 3, 1)
        return {
            "input_ids": generator.integers(0, 16, length).tolist(),
            "loss_mask": [False] * (length - num_supervised) + [True] * num_supervised,
            "category": "chat",
            "conversation_id": f"{split}-{number}",
            "source": "rows.jsonl",
        }

    splits = {"train": num_rows, "held_out": 4}
    DatasetDict(
        {
            split: Dataset.from_list([row(split, i) for i in range(count)], features=FEATURES)
            for split, count in splits.items()
        }
    ).save_to_disk(str(folder))
    write_manifest(folder, {"tokenizer_sha256": file_digest(base / "tokenizer.json")})
    return folder


def rows_of_three_categories(data: Path) -> Any:
    """The training rows of a prepared folder, in turn of category a, b and c."""
    rows = load_prepared(data)["train"].remove_columns("category")
    return rows.add_column("category", ["abc"[i % 3] for i in range(len(rows))])


def tiny_recipe(**train: Any) -> Recipe:
    """Two layers, batches of at most 160 tokens, evaluation of two prompts."""
    settings = {
        "steps": 12, "tokens_per_batch": 160, "learning_rate": 3e-3, "warmup_steps": 2,
        "eval_every": 4, "checkpoint_every": 3, **train,
    }  # fmt: skip
    return Recipe(
        head=HeadRecipe(num_layers=2),
        train=TrainRecipe(**settings),
        eval=EvalRecipe(num_prompts=2, max_prompt_tokens=40, num_tokens=8),
    )
