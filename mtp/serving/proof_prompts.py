"""Texts for `mtp verify --vllm` where no data is given: each has an obvious continuation."""

from __future__ import annotations

from pathlib import Path

from graft.errors import UserError

NUM_PROMPTS, MAX_PROMPT_TOKENS = 16, 1024


def proof_prompts(checkpoint: Path, data: Path | None) -> list[list[int]]:
    """Token ids of held-out prompts of `data`, a folder of `mtp data prepare`, or the built-in."""
    if data is None:
        return built_in_prompts(checkpoint)
    from mtp.data.prompts import evaluation_prompts

    chosen = evaluation_prompts(data, num_prompts=NUM_PROMPTS, max_prompt_tokens=MAX_PROMPT_TOKENS)
    return [list(prompt.token_ids) for prompt in chosen]


def built_in_prompts(checkpoint: Path) -> list[list[int]]:
    """Token ids of the texts below, by the checkpoint's tokenizer.

    Raises:
        UserError: a tokenizer.json that is missing, or that `tokenizers` does not read.
    """
    from tokenizers import Tokenizer

    path = checkpoint / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"a tokenizer at {path}", str(error), "restore that file, or pass --data"
        ) from error
    return [tokenizer.encode(text).ids for text in TEXTS]


TEXTS = (
    '''def read_header(path):
    """Read the header of one shard."""
    with open(path, "rb") as file:
        return file.read(8)


def read_index(path):
    """Read the index of all shards."""
    with open(path, "rb") as file:
''',
    """class Layer:
    def __init__(self, name, size):
        self.name = name
        self.size = size

    def __repr__(self):
        return f"Layer({self.name}, {self.size})"


class Head:
    def __init__(self, name, size):
""",
    """import json
import os
import sys


def main(arguments):
    for name in arguments:
        if not os.path.exists(name):
            print(f"{name} is missing", file=sys.stderr)
            return 1
    return 0


if __name__ ==""",
    """[
  {"position": 1, "layer": "mtp.layers.0", "accepted": true},
  {"position": 2, "layer": "mtp.layers.1", "accepted": true},
  {"position": 3, "layer": "mtp.layers.2", "accepted": true},
""",
    """def test_position_one(head):
    assert head.accepted(0) > 0


def test_position_two(head):
    assert head.accepted(1) > 0


def test_position_three(head):
""",
    """The base model is read, the head is trained, the head is grafted, the model is served.
The base model is read, the head is trained, the head is quantized, the model is served.
The base model is read, the head is trained,""",
    """# Changes

- The reader checks the index against the headers of the shards.
- The writer checks the index against the headers of the shards.
- The planner checks the index against""",
    """for layer in range(num_layers):
    weight = tensors[f"mtp.layers.{layer}.input_layernorm.weight"]
    total += weight.numel()
for layer in range(num_layers):
    weight = tensors[f"mtp.layers.{layer}.post_attention_layernorm.weight"]
""",
)
