"""A tokenizer folder for the data tests: byte-level BPE with Qwen's special tokens, untrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
TEMPLATES = {
    "qwen35": ROOT / "mtp" / "nano" / "chat_template.jinja",
    "chatml": GOLDEN / "data_chatml.jinja",
    "drops_thinking": GOLDEN / "data_drops_thinking.jinja",
}
TRAINING_TEXT = [
    "They differ in x. Reading the file. <|im_start|>assistant\n\n</think>\n\nI need both.",
    "def function(path):\n    return open(path).read()\n\n\nprint(function('a.py'))\n",
    "user assistant system tool_call function parameter path tool_response\n\n\n",
] * 20


def make_base(folder: Path, template: str, *, trim_offsets: bool = False) -> Path:
    """A folder with tokenizer.json and a chat template, as a base model has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in tags])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = TEMPLATES[template].read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    wrapped.save_pretrained(str(folder))
    return folder


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """JSON lines; a row that is a string is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_row(row: Any) -> tuple[str, Any]:
    """(format, value) of a row; a refusal is raised."""
    from mtp.data.conversation import RowError
    from mtp.data.formats import recogniser

    name, value = recogniser().read(row)
    if isinstance(value, RowError):
        raise value
    return name, value


def chat(number: int, num_turns: int = 2) -> dict[str, Any]:
    """A conversation that differs from all others of another number."""
    messages: list[dict[str, str]] = []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"Question {turn} of {number}?"})
        reply = f"Reply {turn} of {number}: " + "so it is. " * (number % 5 + 1)
        messages.append({"role": "assistant", "content": reply, "reasoning_content": "Let me see."})
    return {"id": f"chat-{number}", "messages": messages}
