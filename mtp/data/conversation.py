"""The one internal form of training data, which every reader produces and all else consumes.

Tool arguments and tool schemas stay JSON text: Arrow would unify the types of unrelated tools'
parameters and pad each call with the keys of all others. They are parsed at render time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

CATEGORIES = ("agent", "chat", "code")
ROLES = ("system", "user", "assistant", "tool")
UNKNOWN_LICENCE = "unknown"
MISSING_TOOLS = "tool calls without tool schemas"  # a reason to refuse a row, by default
# Calls that the model wrote as text, because its system message asked for that.
_TEXT_CALLS = ("<function=", "<tool_call>", "```mswea_bash_command", "\nAction Input:")


_NOT_SAID = frozenset(("id", "source", "licence", "category", "teacher"))


class RowError(Exception):
    """A row that cannot be used; its text is the reason, for the report."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """Rows that are sound but of no use, and why: a log's summaries, rows that a filter drops."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of an assistant turn; `arguments` is the text of a JSON object."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn.

    Args:
        role: one of ROLES.
        content: its text; "" when there is none.
        reasoning: an assistant turn's thinking, without tags.
        tool_calls: an assistant turn's calls in order, parallel ones together.
        tool_call_id: of a tool turn, the call that it answers; "" when the source names none.
        name: of a tool turn, the tool.
        supervised: False for an assistant turn that its source marks as context.
        token_ids: of an assistant turn that the base itself generated, its tokens.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    supervised: bool = True
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in order, with where they come from.

    Args:
        messages: the turns. Without any assistant turn it is a list of prompts, to be asked one
            after another: material for regeneration and evaluation, never for training.
        tools: one JSON text a schema, each `{"type": "function", "function": {...}}`.
        id: the row's own id, or a digest of what it says.
        source: the file, folder or data set.
        licence: as the row states it.
        category: one of CATEGORIES.
        teacher: the model that wrote the assistant turns, where the row names it.
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    id: str = ""
    source: str = ""
    licence: str = UNKNOWN_LICENCE
    category: str = "chat"
    teacher: str = ""

    @property
    def is_prompts_only(self) -> bool:
        """Whether a user asks and no assistant answers."""
        roles = {message.role for message in self.messages}
        return "user" in roles and "assistant" not in roles


@dataclass(frozen=True, kw_only=True)
class Document:
    """Raw text without roles, supervised throughout."""

    text: str
    id: str = ""
    source: str = ""
    licence: str = UNKNOWN_LICENCE
    category: str = "code"
    teacher: str = ""


def printable(text: str) -> str:
    """A text that can be written as UTF-8: names of files, and JSON, may hold lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def infer_category(messages: tuple[Message, ...], tools: tuple[str, ...]) -> str:
    """`agent` when tools are offered or used, be it in text, else `chat`."""
    used = any(message.tool_calls or message.role == "tool" for message in messages)
    written = any(
        message.role == "assistant" and has_call_in_text(message.content) for message in messages
    )
    return "agent" if tools or used or written else "chat"


def has_call_in_text(content: str) -> bool:
    """Whether an assistant turn makes a call in its text, as some system messages ask for."""
    return any(mark in content for mark in _TEXT_CALLS)


def content_digest(item: Conversation | Document) -> str:
    """SHA-256 of what the item says, whatever its id, source, licence and teacher.

    Raises:
        RowError: the text is not valid Unicode, so that no tokenizer could read it.
    """
    said = {key: value for key, value in vars(item).items() if key not in _NOT_SAID}
    try:
        # Messages and calls inside are dataclasses too.
        text = json.dumps(said, ensure_ascii=False, default=_without_tokens)
        return hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise RowError("text is not valid Unicode (a lone surrogate)") from error


def _without_tokens(part: Message | ToolCall) -> dict[str, object]:
    return {key: value for key, value in vars(part).items() if key != "token_ids"}


def cut_at_mismatch(conversation: Conversation) -> Conversation:
    """The conversation up to the first tool result that answers no call, or unanswered call.

    What follows such a place was written by a model that saw something else. Results are
    matched by id, or by order where there are no ids. A user may interrupt calls, and a model
    that calls in plain text gets results without any structured call: both are left alone.
    """
    pending: list[str] | None = None  # ids of open calls; None when the last turn made none
    spoken = False
    for index, message in enumerate(conversation.messages):
        fits = True
        if message.role == "assistant":
            fits = not pending
            pending = [call.id for call in message.tool_calls] or None
            spoken = True
        elif message.role == "tool":
            fits = spoken if pending is None else _answer(pending, message.tool_call_id)
        else:
            pending = None
        if not fits:
            return replace(conversation, messages=conversation.messages[:index])
    return conversation


def _answer(pending: list[str], call_id: str) -> bool:
    """Remove the call that a result answers; whether there was one."""
    if call_id and any(pending):
        found = call_id in pending
        if found:
            pending.remove(call_id)
        return found
    if pending:
        pending.pop(0)
        return True
    return False


def checked(conversation: Conversation, *, allow_missing_tools: bool = False) -> Conversation:
    """The conversation with its system messages merged at the front, or the reason to refuse it.

    Many templates take one system message, and only there. Before the first reply its place makes
    no difference to what the model knew; later it would tell the model too early.

    Raises:
        RowError: a system message after the first reply, no user turn, no supervised assistant turn
            after it, or tool calls without any schema (the model would learn invented names)
            unless `allow_missing_tools`.
    """
    messages = list(conversation.messages)
    roles = [message.role for message in messages]
    first_reply = roles.index("assistant") if "assistant" in roles else len(roles)
    if "system" in roles[first_reply:]:
        late = roles.index("system", first_reply)
        raise RowError(f"a system message after the first reply (message {late})")
    if roles.count("system") > 1 or "system" in roles[1:]:
        merged = "\n\n".join(m.content for m in messages if m.role == "system")
        others = [message for message in messages if message.role != "system"]
        messages = [Message(role="system", content=merged), *others]
        roles = [message.role for message in messages]
    if "user" not in roles:
        raise RowError("no user message")
    replies = messages[roles.index("user") :]
    if not any(message.role == "assistant" and message.supervised for message in replies):
        raise RowError("no assistant message to learn from after the first user message")
    if not conversation.tools and not allow_missing_tools and any(m.tool_calls for m in messages):
        raise RowError(MISSING_TOOLS)
    return replace(conversation, messages=tuple(messages))
