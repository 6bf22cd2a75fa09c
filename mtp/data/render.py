"""Messages to text with the base's own chat template, and text to tokens with character offsets.

The rendered text is tokenised as a whole, special tokens included, exactly as a server does it:
a marker such as `<|im_start|>` inside a user's or a tool's text becomes the special token there
too. That is what the served model will see; the loss mask never looks at markers (mask.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from graft.errors import UserError
from mtp.data.conversation import Message, RowError

THINKING = ("keep", "strip")


class Renderer:
    """The base's tokenizer and chat template under one setting of thinking.

    Args:
        tokenizer: a fast transformers tokenizer.
        thinking: "keep" renders as a server with thinking on, the reasoning included; "strip"
            removes all reasoning and renders as with `enable_thinking=false`.
    """

    def __init__(self, tokenizer: Any, *, thinking: str = "keep") -> None:
        if thinking not in THINKING:
            raise UserError("thinking 'keep' or 'strip'", f"{thinking!r}", "fix --thinking")
        self.tokenizer = tokenizer
        self.thinking = thinking
        self.end_tokens = tuple(
            str(token.content)
            for token in tokenizer.added_tokens_decoder.values()
            if token.special and token.content.strip()
        )
        self._backend = _untrimmed(tokenizer)

    def text(
        self,
        messages: tuple[Message, ...],
        tools: tuple[str, ...],
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Render messages as the server would.

        Raises:
            RowError: the template refuses the conversation; its own words are the reason.
        """
        from jinja2 import TemplateError

        conversation = [self._as_dict(message) for message in messages]
        schemas = [json.loads(tool) for tool in tools]
        try:
            return self.tokenizer.apply_chat_template(
                conversation,
                tools=schemas or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                enable_thinking=self.thinking == "keep",
            )
        except (TemplateError, TypeError) as error:  # TypeError: "only item pairs of a mapping"
            raise RowError(f"the chat template refuses it: {error}") from error

    def encode(
        self, texts: list[str], *, add_special_tokens: bool
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids [T] int32, character offsets [T, 2] int64) of each text, on all cores."""
        encodings = self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        return [
            (
                np.asarray(encoding.ids, dtype=np.int32),
                np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2),
            )
            for encoding in encodings
        ]

    def _as_dict(self, message: Message) -> dict[str, Any]:
        rendered: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name:
            rendered["name"] = message.name
        if message.tool_call_id:
            rendered["tool_call_id"] = message.tool_call_id
        if message.role == "assistant":
            # Always a string: templates otherwise look for thinking tags inside the content.
            rendered["reasoning_content"] = message.reasoning if self.thinking == "keep" else ""
        if message.tool_calls:
            rendered["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    # Templates iterate over the arguments: a JSON text would fail or be
                    # encoded twice.
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.tool_calls
            ]
        return rendered


def load_tokenizer(base: Path) -> Any:
    """The base's tokenizer, from disk only.

    Raises:
        UserError: no usable fast tokenizer, or no chat template.
    """
    from transformers import AutoTokenizer

    expected = "a base model with tokenizer.json and a chat template"
    action = "point --base at a complete checkpoint folder"
    if not (base / "tokenizer.json").is_file():
        raise UserError(expected, f"no tokenizer.json in {base}", action)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(base), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(expected, f"{base}: {str(error)[:200]}", action) from error
    if not tokenizer.is_fast:
        raise UserError("a fast tokenizer", f"a slow one in {base}", action)
    if not tokenizer.chat_template:
        raise UserError(expected, f"no chat template in {base}", action)
    return tokenizer


def tokenizer_fingerprint(base: Path, tokenizer: Any) -> dict[str, str]:
    """SHA-256 of the base's tokenizer file and of its chat template."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return {
        "tokenizer_sha256": hashlib.sha256((base / "tokenizer.json").read_bytes()).hexdigest(),
        "chat_template_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def _untrimmed(tokenizer: Any) -> Any:
    """The tokenizer's Rust backend, with offsets that cover each token's whitespace too.

    Byte-level post-processors may report offsets without leading and trailing whitespace; a
    token "\\n" would then seem empty, and a token over a span's edge would seem to be inside.
    """
    from tokenizers import Tokenizer

    specification = json.loads(tokenizer.backend_tokenizer.to_str())

    def switch_off(node: Any) -> None:
        if isinstance(node, dict):
            if "trim_offsets" in node:
                node["trim_offsets"] = False
            for child in node.values():
                switch_off(child)
        elif isinstance(node, list):
            for child in node:
                switch_off(child)

    switch_off(specification["post_processor"])
    backend = Tokenizer.from_str(json.dumps(specification))
    backend.no_padding()
    backend.no_truncation()
    return backend
