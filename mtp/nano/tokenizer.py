"""The small base's tokenizer: byte-level BPE of about 4k entries, with Qwen3.5's markers.

As in Qwen, the turn markers are special tokens and the tags of calls, tool results and thinking
are added tokens that are *not* special: `skip_special_tokens` keeps them in the text.

AutoTokenizer picks the class by the model type, so transformers loads this as `Qwen3_5Tokenizer`,
which brings a pattern and a normalizer (NFC) of its own. Both are therefore the same here, and
whichever class a program loads gives the same ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TAG_TOKENS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
# transformers, models/qwen3_5/tokenization_qwen3_5.py: digits stand alone.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def chat_template() -> str:
    """The text of the chat template that is shipped with the package."""
    return (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def build_tokenizer(
    texts: Iterable[str], *, num_entries: int = 4096, max_length: int = 4096
) -> PreTrainedTokenizerFast:
    """Train the tokenizer on texts.

    Args:
        texts: training text.
        num_entries: size of the vocabulary, added tokens included.
        max_length: what the tokenizer states as the model's longest input.

    Returns:
        A fast tokenizer with chat template, ready for `save_pretrained`.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pre: Any = pre_tokenizers
    tokenizer.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_entries - len(SPECIAL_TOKENS) - len(TAG_TOKENS),
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in TAG_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=chat_template(),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def render(tokenizer: PreTrainedTokenizerFast, conversation: dict[str, Any], **options: Any) -> str:
    """Render a recorded conversation with a chat template, its arguments parsed for it.

    Args:
        tokenizer: whose chat template to use.
        conversation: a row as `record_traces` writes it.
        **options: more for `apply_chat_template`, such as `add_generation_prompt`.
    """
    text = tokenizer.apply_chat_template(
        with_parsed_arguments(conversation["messages"]),
        tools=conversation["tools"],
        tokenize=False,
        **options,
    )
    return str(text)


def with_parsed_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copy messages with the JSON text of call arguments turned into mappings."""
    import json

    parsed = []
    for message in messages:
        calls = [
            call
            | {
                "function": call["function"]
                | {"arguments": json.loads(call["function"]["arguments"])}
            }
            for call in message.get("tool_calls") or []
        ]
        parsed.append(message | ({"tool_calls": calls} if calls else {}))
    return parsed
