"""Messages to text with the base's own chat template, and text to tokens with character offsets.

The rendered text is tokenised as a whole, special tokens included, exactly as a server does it:
a marker such as `<|im_start|>` inside a user's or a tool's text becomes the special token there
too. That is what the served model will see; the loss mask never looks at markers (mask.py). Only in
replies to learn from, markers in the reply's own text stay text (literals.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from graft.errors import UsageError, UserError
from mtp.data.conversation import Message, RowError
from mtp.data.encode import Encoded, Encoder
from mtp.data.literals import Literals
from mtp.data.template import CHANGING, Memory, PrefixTemplate, wanted_variables

THINKING = ("keep", "strip")
_REFUSALS = (TemplateError, TypeError)  # TypeError: "can only get item pairs from a mapping"
_CHECKED_ONE_IN = 256
_TOOLS_KEPT = 64  # rows of a source mostly have the same ones


class Renderer:
    """The base's tokenizer and chat template under one setting of thinking.

    Args:
        tokenizer: a fast transformers tokenizer, or its `PlainTokenizer`.
        thinking: "keep" renders as a server with thinking on, the reasoning included; "strip"
            removes all reasoning and renders as with `enable_thinking=false`.
        num_checked: texts of `Prefixes` that are compared at first, for each template.
    """

    def __init__(self, tokenizer: Any, *, thinking: str = "keep", num_checked: int = 32) -> None:
        if thinking not in THINKING:
            raise UsageError("thinking 'keep' or 'strip'", f"{thinking!r}", "fix --thinking")
        self.tokenizer = tokenizer
        self.thinking = thinking
        self.encoder = Encoder(tokenizer)
        self.end_tokens = self.encoder.special_tokens
        self.literals = Literals(self.end_tokens, can_spell=self.encoder.can_spell)
        self._num_checked = num_checked
        self._templates: dict[str, RenderedTemplate] = {}
        self._schemas: dict[tuple[str, ...], list[Any] | None] = {}

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
        try:
            return self._apply(messages, tools, add_generation_prompt=generation_prompt)
        except _REFUSALS as error:
            raise _refusal(error) from error

    def prefixes(self, messages: tuple[Message, ...], tools: tuple[str, ...]) -> Prefixes:
        """`text` of any number of the first messages, much faster for many."""
        return Prefixes(self, messages, tools)

    def encode(self, texts: list[str]) -> list[Encoded]:
        """(ids [T] int32, character offsets [T, 2] int64) of each text, on all cores."""
        return self.encoder.encode(texts)

    def template(self, tools: tuple[str, ...]) -> RenderedTemplate:
        """The template for rows with these tools."""
        source = self.tokenizer.get_chat_template(tools=list(tools) or None)
        if source not in self._templates:
            try:
                remembering = self._remembering(source)
            except (
                Exception
            ):  # transformers' own render is to say what is wrong with it, if anything
                remembering = None
            self._templates[source] = RenderedTemplate(remembering, self._num_checked)
        return self._templates[source]

    def _remembering(self, source: str) -> PrefixTemplate | None:
        """A template that remembers, or None for one that cannot."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template(source).environment
        # Some variables come from the tokenizer, so transformers is asked for all.
        names = wanted_variables(source, environment) - CHANGING
        asked = (f'"{n}": [{n}] if {n} is defined else []' for n in sorted(names))
        dumped = "{{ {" + ", ".join(asked) + "} | tojson }}"
        found = json.loads(self._apply((Message(role="user"),), (), chat_template=dumped))
        variables = {name: value[0] for name, value in found.items() if value}
        template = PrefixTemplate(source, environment, variables)
        return template if template.num_remembered else None

    def schemas(self, tools: tuple[str, ...]) -> list[Any] | None:
        """The tools as templates get them."""
        if tools not in self._schemas:
            if len(self._schemas) >= _TOOLS_KEPT:
                self._schemas.clear()
            self._schemas[tools] = [json.loads(tool) for tool in tools] or None
        return self._schemas[tools]

    def as_dict(self, message: Message) -> dict[str, Any]:
        """A message as chat templates know it."""
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

    def _apply(self, messages: tuple[Message, ...], tools: tuple[str, ...], **settings: Any) -> str:
        return self.tokenizer.apply_chat_template(
            [self.as_dict(message) for message in messages],
            tools=[json.loads(tool) for tool in tools] or None,
            tokenize=False,
            enable_thinking=self.thinking == "keep",
            **settings,
        )


class RenderedTemplate:
    """One template of a tokenizer, and how far its memory is trusted.

    Args:
        remembering: renders it; None leaves all to transformers.
        num_checked: texts that are compared at first.
    """

    def __init__(self, remembering: PrefixTemplate | None, num_checked: int) -> None:
        self.remembering = remembering
        self._num_checked, self._num_texts = num_checked, 0

    def is_checked(self) -> bool:
        """Whether the next text is to be compared."""
        self._num_texts += 1
        is_early = self._num_texts <= self._num_checked
        return is_early or self._num_texts % _CHECKED_ONE_IN == 0

    def compare(self, found: str, wanted: str) -> None:
        """Take note of a text with memory, and what it should be.

        Raises:
            RuntimeError: they differ, but earlier ones did not.
        """
        if found != wanted:
            self.remembering = None
            if self._num_texts > self._num_checked:
                raise RuntimeError(
                    "the chat template was misunderstood, earlier masks may be wrong: please report"
                )


class Prefixes:
    """The texts of the first messages of one conversation.

    The first ones that a renderer makes with a template, and then one of many, are compared with
    what transformers makes of the messages. Where the first ones differ, so that this is a template
    or a version of transformers that is not understood, all are left to transformers.
    """

    def __init__(
        self, renderer: Renderer, messages: tuple[Message, ...], tools: tuple[str, ...]
    ) -> None:
        self._renderer, self._messages, self._tools = renderer, messages, tools
        self._template: RenderedTemplate | None = None
        self._memory: Memory | None = None
        self._latest: tuple[tuple[int, bool], str] | None = None

    def text(self, count: int, *, generation_prompt: bool = False) -> str:
        """As `Renderer.text` of the first `count` messages.

        Raises:
            RowError: the template refuses them; its own words are the reason.
        """
        asked = count, generation_prompt
        if self._latest is not None and self._latest[0] == asked:
            return self._latest[1]
        if self._template is None:
            self._template = self._renderer.template(self._tools)
        remembering = self._template.remembering
        if remembering is None:
            text = self._plain(count, generation_prompt)
        elif self._template.is_checked():
            text = self._plain(count, generation_prompt)
            try:
                found = self._remembered(remembering, count, generation_prompt)
            except Exception as error:
                found = repr(error)
            self._template.compare(found, text)
        else:
            try:
                text = self._remembered(remembering, count, generation_prompt)
            except _REFUSALS as error:
                raise _refusal(error) from error
        self._latest = asked, text
        return text

    def _plain(self, count: int, generation_prompt: bool) -> str:
        return self._renderer.text(
            self._messages[:count], self._tools, generation_prompt=generation_prompt
        )

    def _remembered(self, template: PrefixTemplate, count: int, generation_prompt: bool) -> str:
        if self._memory is None:
            from transformers.utils.chat_template_utils import _alias_reasoning_fields

            self._schemas = self._renderer.schemas(self._tools)
            self._dicts = _alias_reasoning_fields(list(map(self._renderer.as_dict, self._messages)))
            self._memory = template.new_memory()
        messages = self._dicts[:count]
        return template.render(self._memory, messages, self._schemas, prompt=generation_prompt)


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


def _refusal(error: Exception) -> RowError:
    return RowError(f"the chat template refuses it: {error}")
