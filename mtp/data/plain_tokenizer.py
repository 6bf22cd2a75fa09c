"""What the work on rows needs of a tokenizer, without transformers' own classes.

Importing those brings torch: 200 MB and some seconds for each process. The parts here are what they
wrap: the Rust tokenizer's description, the chat template's text and transformers' function that
renders it, in its sandbox. It can be sent to another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PlainTokenizer:
    """Stands in for a fast transformers tokenizer, for rendering and encoding.

    Args:
        description: of the Rust tokenizer, as JSON.
        template, template_with_tools: chat templates; mostly the same.
        special_tokens: which templates may name, `bos_token` and the like.
    """

    description: str
    template: str
    template_with_tools: str
    special_tokens: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: Any) -> PlainTokenizer:
        """The parts of a transformers tokenizer."""
        return cls(
            description=tokenizer.backend_tokenizer.to_str(),
            template=tokenizer.get_chat_template(),
            template_with_tools=tokenizer.get_chat_template(tools=[{}]),
            special_tokens={
                # Some are objects of the tokenizer; templates get text.
                name: [str(token) for token in value] if isinstance(value, list) else str(value)
                for name, value in tokenizer.special_tokens_map.items()
            },
        )

    @property
    def backend_tokenizer(self) -> Any:
        """The Rust tokenizer."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.description)

    def get_chat_template(self, tools: list[Any] | None = None) -> str:
        """The template for a conversation with these tools."""
        return self.template_with_tools if tools else self.template

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, as transformers' method of that name has it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables.pop("tokenize", None)
        texts, _ = render_jinja_template(
            conversations=[conversation],
            tools=tools,
            chat_template=chat_template or self.get_chat_template(tools),
            **{**self.special_tokens, **variables},
        )
        return texts[0]
