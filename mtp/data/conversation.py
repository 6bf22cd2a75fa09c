"""The one internal form of training data, which every reader produces and all else consumes.

Tool arguments and tool schemas stay JSON text: Arrow would unify the types of unrelated tools'
parameters and pad each call with the keys of all others. They are parsed at render time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

CATEGORIES = ("agent", "chat", "code")
ROLES = ("system", "user", "assistant", "tool")
UNKNOWN_LICENCE = "unknown"


class RowError(Exception):
    """A row that cannot be used; its text is the reason, for the report."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of an assistant turn; `arguments` is the text of a JSON object."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn. `supervised` is False for an assistant turn that its source marks as context."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    supervised: bool = True


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in order; `tools` holds one JSON text a schema."""

    id: str
    source: str
    licence: str
    category: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Document:
    """Raw text without roles, supervised throughout."""

    id: str
    source: str
    licence: str
    text: str
    category: str = "code"


def infer_category(messages: tuple[Message, ...], tools: tuple[str, ...]) -> str:
    """`agent` when tools are offered or used, else `chat`."""
    used = any(message.tool_calls or message.role == "tool" for message in messages)
    return "agent" if tools or used else "chat"


def content_digest(item: Conversation | Document) -> str:
    """SHA-256 of what the item says, whatever its id, source and licence.

    Raises:
        RowError: the text is not valid Unicode, so that no tokenizer could read it.
    """
    fields = asdict(replace(item, id="", source="", licence="", category=""))
    try:
        return hashlib.sha256(json.dumps(fields, ensure_ascii=False).encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise RowError("text is not valid Unicode (a lone surrogate)") from error


def checked(conversation: Conversation, *, allow_missing_tools: bool = False) -> Conversation:
    """The conversation with its leading system messages merged, or the reason to refuse it.

    Raises:
        RowError: a system message after the start, no user turn, no supervised assistant turn
            after it, or tool calls without any schema (the model would learn invented names)
            unless `allow_missing_tools`.
    """
    messages = list(conversation.messages)
    num_system = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    if num_system > 1:
        merged = "\n\n".join(message.content for message in messages[:num_system])
        messages[:num_system] = [Message(role="system", content=merged)]
    roles = [message.role for message in messages]
    if "system" in roles[1:]:
        raise RowError(f"a system message after the start (message {roles.index('system', 1)})")
    if "user" not in roles:
        raise RowError("no user message")
    replies = messages[roles.index("user") :]
    if not any(message.role == "assistant" and message.supervised for message in replies):
        raise RowError("no assistant message to learn from after the first user message")
    if not conversation.tools and not allow_missing_tools and any(m.tool_calls for m in messages):
        raise RowError("tool calls without tool schemas")
    return replace(conversation, messages=tuple(messages))
