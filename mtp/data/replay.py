"""One conversation asked of the base again, turn by turn (`mtp data regenerate`).

Which answers may be kept, and where the recorded trace stops to follow from them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mtp.data.conversation import Conversation, Message, ToolCall, has_call_in_text
from mtp.data.server import RequestRefusedError, Server


class UnfitAnswerError(Exception):
    """An answer that must not be learned from; its text is the reason."""


def replay(conversation: Any, server: Server, settings: dict[str, Any]) -> dict[str, Any]:
    """The row of a replayed `Conversation`.

    Raises:
        UnfitAnswerError: not even the first answer can be kept.
        RequestRefusedError, ServerGoneError: as `Server.complete`.
    """
    messages: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    ended = "whole"
    for recorded, results in _steps(conversation):
        if recorded is not None and (recorded.role != "assistant" or not recorded.supervised):
            messages.append(_as_dict(recorded))
            messages += map(_as_dict, results)
            continue
        try:
            choice = server.complete(_request(messages, conversation.tools, settings))
            message = _kept(choice)
        except (UnfitAnswerError, RequestRefusedError) as error:
            if not turns:
                raise
            ended = str(error)
            break
        messages.append(message)
        prompt = choice["prompt_token_ids"]
        turns.append(
            {
                "finish_reason": choice["finish_reason"],
                "token_ids": choice["token_ids"],
                "num_prompt_tokens": len(prompt) if prompt else None,
            }
        )
        ended = _parting(message, recorded)
        if ended != "whole":
            break
        messages += _answered(message.get("tool_calls", []), results, recorded)
    return _row(conversation, messages, turns, ended, settings)


def _steps(conversation: Conversation) -> Iterator[tuple[Message | None, list[Message]]]:
    """Turns with the tool results after each; None is an answer that no one recorded.

    A greeting before the first request is marked as context: no server generates it.
    """
    said = conversation.messages
    asked = False
    for position, message in enumerate(said):
        if message.role == "tool":
            continue
        asked |= message.role == "user"
        if message.role == "assistant" and not asked:
            message = replace(message, supervised=False)
        after = itertools.takewhile(lambda m: m.role == "tool", said[position + 1 :])
        yield message, list(after)
        if conversation.is_prompts_only and message.role == "user":
            yield None, []


def _parting(message: dict[str, Any], recorded: Message | None) -> str:
    """Why the trace's next turns do not follow from this answer, or "whole" when they do."""
    calls = [
        (call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]
    wanted = recorded.tool_calls if recorded is not None else ()
    if calls != [(call.name, _canonical(call.arguments)) for call in wanted]:
        if calls:
            return "at a call that the trace did not make"
        return "at an answer where the trace made a call"
    # A call in plain text: what follows is its result, whatever the role.
    texts = (message["content"], recorded.content if recorded is not None else "")
    if any(map(has_call_in_text, texts)) and texts[0] != texts[1]:
        return "at a call in its text that the trace did not make"
    return "whole"


def _as_dict(message: Message) -> dict[str, Any]:
    """A turn as the trace has it."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "assistant":
        turn["weight"] = 0
    return turn


def _request(
    messages: list[dict[str, Any]], tools: tuple[str, ...], settings: dict[str, Any]
) -> dict[str, Any]:
    request = {
        "model": settings["model"],
        "messages": [{k: v for k, v in m.items() if k != "weight"} for m in messages],
        "chat_template_kwargs": {"enable_thinking": settings["thinking"] == "keep"},
        "return_token_ids": True,  # vLLM's; others ignore it
        **settings["sampling"],
    }
    if tools:
        request["tools"] = [json.loads(tool) for tool in tools]
    return request


def _kept(choice: dict[str, Any]) -> dict[str, Any]:
    """The answer as a message of the row.

    Raises:
        UnfitAnswerError: it was cut off, is empty, or holds calls that nobody parsed.
    """
    message = choice["message"]
    content = message.get("content") or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    if choice["finish_reason"] not in ("stop", "tool_calls"):
        raise UnfitAnswerError(f"cut off ({choice['finish_reason']})")
    if not reasoning and "</think>" in content:
        # A server without a reasoning parser; the template itself opens the thinking.
        reasoning, _, content = content.partition("</think>")
        reasoning = reasoning.removeprefix("<think>")
    calls: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        if not isinstance(_parsed(function.get("arguments") or "{}"), dict):
            raise UnfitAnswerError("a call whose arguments are no JSON object")
        calls.append(
            {
                "id": call.get("id") or f"call_{len(calls)}",
                "type": "function",
                "function": {
                    "name": function.get("name", ""),
                    "arguments": function.get("arguments") or "{}",
                },
            }
        )
    if not calls and "<tool_call>" in content:
        raise UnfitAnswerError("a call that the server did not parse (--tool-call-parser)")
    if not (content.strip() or calls):
        # The template would close the thinking, which the base did not.
        raise UnfitAnswerError("thinking without an answer" if reasoning.strip() else "empty")
    kept = {"role": "assistant", "content": content.strip()}
    if reasoning.strip():
        kept["reasoning_content"] = reasoning.strip()
    return kept | ({"tool_calls": calls} if calls else {})


def _canonical(text: Any) -> str:
    """JSON text by its value; 1 and true differ here, as Python values they do not."""
    return json.dumps(_parsed(text), sort_keys=True)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return None


def _answered(
    calls: list[dict[str, Any]], results: list[Message], recorded: Message | None
) -> Iterator[dict[str, Any]]:
    """The recorded results as answers to the base's calls, by id or else by order."""
    wanted: tuple[ToolCall, ...] = recorded.tool_calls if recorded is not None else ()
    new_ids = {old.id: call["id"] for old, call in zip(wanted, calls, strict=True) if old.id}
    for number, result in enumerate(results):
        by_order = calls[number]["id"] if number < len(calls) else ""
        answered = new_ids.get(result.tool_call_id, by_order)
        yield {"role": "tool", "content": result.content, "tool_call_id": answered}


def _row(
    conversation: Conversation,
    messages: list[dict[str, Any]],
    turns: list[dict[str, Any]],
    ended: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return {
        "id": conversation.id,
        "source": conversation.source,
        "license": conversation.licence,
        "messages": messages[: last + 1],
        "tools": [json.loads(tool) for tool in conversation.tools],
        "model": settings["model"],
        "regenerated": {"ended": ended, "turns": turns},
    }
