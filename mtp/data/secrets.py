"""Keys, passwords and addresses in training text, found and masked or dropped on request.

Yelp's detect-secrets has the patterns of some twenty services' keys, and needs nothing but
requests and PyYAML (Microsoft's Presidio would bring spaCy and a model of each language). Left out
are its guesses by entropy and by words such as "password": source code is full of digests and of
variables of that name. Personal data is e-mail and public IP addresses only; names are not found.
What was found is counted by kind and never shown.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from graft.errors import UserError
from mtp.data.conversation import Conversation, Document, Message, ToolCall

SCAN = ("mask", "drop")
# detect-secrets' classes; the two that guess are left out.
PLUGINS = (
    "ArtifactoryDetector", "AWSKeyDetector", "AzureStorageKeyDetector", "BasicAuthDetector",
    "CloudantDetector", "DiscordBotTokenDetector", "GitHubTokenDetector", "GitLabTokenDetector",
    "IbmCloudIamDetector", "IbmCosHmacDetector", "IPPublicDetector", "JwtTokenDetector",
    "MailchimpDetector", "NpmDetector", "OpenAIDetector", "PypiTokenDetector",
    "SendGridDetector", "SlackDetector", "SoftlayerDetector", "SquareOAuthDetector",
    "StripeDetector", "TelegramBotTokenDetector", "TwilioKeyDetector",
)  # fmt: skip
# Its private key detector finds the first line only.
_OWN = {
    "private key": re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
        r".*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
        re.DOTALL,
    ),
    "e-mail address": re.compile(
        r"(?<![\w.+-])[A-Za-z0-9][\w.+-]*@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}(?![\w-])"
    ),
}
# Reserved for examples (RFC 2606 and 6761), and addresses that name a service.
_NO_PERSON = re.compile(
    r"@(?:[\w-]+\.)*(?:example(?:\.com|\.org|\.net)?|test|invalid|localhost)$"
    r"|^(?:git|noreply|no-reply)@|@users\.noreply\.github\.com$",
    re.IGNORECASE,
)

# Some patterns stop inside a key: after so many letters, or before a token's signature.
_REST = re.compile(r"[\w+/=-]*")
_REST_OF_JWT = re.compile(r"(?:\.?[\w+/=-]+)*")

Value = Conversation | Document
Finder = Callable[[str], Iterator[tuple[int, int]]]


def require_scanner() -> None:
    """Refuse a scan that cannot be made.

    Raises:
        UserError: detect-secrets is missing.
    """
    try:
        import detect_secrets  # noqa: F401
    except ImportError as error:
        action = "run `pip install detect-secrets`"
        raise UserError("detect-secrets for --scan", "none", action) from error


def masked(item: Value) -> tuple[Value, Counter[str]]:
    """The item with `<KIND removed>` in place of what was found, and how often by kind.

    Calls' arguments and schemas are changed value by value, so they stay JSON.
    """
    counts: Counter[str] = Counter()

    def clean(text: str) -> str:
        return _masked_text(text, counts)

    if isinstance(item, Document):
        return replace(item, text=clean(item.text)), counts
    messages = tuple(_masked_message(message, clean) for message in item.messages)
    tools = tuple(_in_json(tool, clean) for tool in item.tools)
    return replace(item, messages=messages, tools=tools), counts


def _masked_message(message: Message, clean: Callable[[str], str]) -> Message:
    calls: list[ToolCall] = [
        replace(call, arguments=_in_json(call.arguments, clean)) for call in message.tool_calls
    ]
    return replace(
        message,
        content=clean(message.content),
        reasoning=clean(message.reasoning),
        tool_calls=tuple(calls),
    )


def _in_json(text: str, clean: Callable[[str], str]) -> str:
    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return clean(value)
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if isinstance(value, dict):
            return {clean(key): walk(inner) for key, inner in value.items()}
        return value

    before = json.loads(text)
    after = walk(before)
    return text if after == before else json.dumps(after, ensure_ascii=False)


def _masked_text(text: str, counts: Counter[str]) -> str:
    found: list[tuple[int, int, str]] = []
    for kind, spans in _finders():
        found += [(start, end, kind) for start, end in spans(text)]
    if not found:
        return text
    pieces, position = [], 0
    for start, end, kind in sorted(found, key=lambda span: (span[0], -span[1])):
        if start < position:  # inside what is already gone
            continue
        counts[kind] += 1
        pieces += [text[position:start], f"<{kind} removed>"]
        position = end
    return "".join(pieces) + text[position:]


@lru_cache(maxsize=1)
def _finders() -> list[tuple[str, Finder]]:
    """(kind, spans of a text) of every pattern."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector

    classes = {cls.__name__: cls for cls in get_mapping_from_secret_type_to_class().values()}
    missing = sorted(set(PLUGINS) - set(classes))
    if missing:
        found = f"one without {', '.join(missing)}"
        raise UserError("detect-secrets 1.5 or newer", found, "upgrade it")
    finders: list[tuple[str, Finder]] = [
        (kind, _own_spans(pattern)) for kind, pattern in _OWN.items()
    ]
    for name in PLUGINS:
        plugin = classes[name]()
        # One that looks closer than its patterns (a JWT must decode) is asked about each match.
        plain = type(plugin).analyze_string is RegexBasedDetector.analyze_string
        finders.append((plugin.secret_type, _plugin_spans(plugin, plain)))
    return finders


def _own_spans(pattern: re.Pattern[str]) -> Finder:
    def spans(text: str) -> Iterator[tuple[int, int]]:
        for match in pattern.finditer(text):
            if not _NO_PERSON.search(match.group()):
                yield match.span()

    return spans


def _plugin_spans(plugin: Any, plain: bool) -> Finder:
    name = type(plugin).__name__
    rest = _REST_OF_JWT if name == "JwtTokenDetector" else _REST

    def spans(text: str) -> Iterator[tuple[int, int]]:
        for pattern in plugin.denylist:
            for match in pattern.finditer(text):
                if not plain and not any(plugin.analyze_string(match.group())):
                    continue
                if name == "BasicAuthDetector":  # the password alone: the URL may stay
                    yield match.span(1)
                    continue
                # Never a group: in some patterns it is the prefix of the key only.
                tail = rest.match(text, match.end())
                yield match.start(), tail.end() if tail else match.end()

    return spans
