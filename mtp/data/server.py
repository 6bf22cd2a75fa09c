"""Chat completions from an OpenAI-compatible server, tried again when it is busy or breaks off.

Standard library only: a request is one POST, and threads wait for it. What is worth another try
and what is not is told apart, since an answer may be half, late, or refused for good.
"""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graft.errors import UserError

_BUSY = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
_LONGEST_WAIT = 60.0


class RequestRefusedError(Exception):
    """The server will never answer this request: too long, say. Its text is the reason."""


class ServerGoneError(Exception):
    """No answer after all tries; its text is what came last."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """An OpenAI-compatible server.

    Args:
        url: up to and including /v1.
        api_key: sent as a bearer token when it is not "".
        timeout_seconds: for one answer.
        num_tries: for one request, the waits doubling from `first_wait_seconds`.
        sleep: replaced in tests.
    """

    url: str
    api_key: str = field(default="", repr=False)
    timeout_seconds: float = 600.0
    num_tries: int = 6
    first_wait_seconds: float = 1.0
    sleep: Callable[[float], None] = time.sleep

    def model(self) -> dict[str, Any]:
        """The first model that the server lists.

        Raises:
            UserError: no server, or one that lists none.
        """
        expected = "an OpenAI-compatible server with a model"
        try:
            listed = self._send("/models", None)
            return next(model for model in listed["data"] if isinstance(model["id"], str))
        except (ServerGoneError, RequestRefusedError) as error:
            action = "start it, or fix --url (it ends in /v1)"
            raise UserError(expected, f"{self.url}: {error}", action) from error
        except (KeyError, TypeError, StopIteration) as error:
            raise UserError(expected, f"{self.url} lists none", "fix --url") from error

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a chat completion request: its first choice, checked to be whole.

        Returns:
            `message`, `finish_reason`, and `token_ids` and `prompt_token_ids` (None where the
            server sends none).

        Raises:
            RequestRefusedError: the server refuses this very request.
            ServerGoneError: no whole answer after all tries.
        """
        return self._send("/chat/completions", request, _choice)

    def _send(
        self,
        path: str,
        request: dict[str, Any] | None,
        read: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        wait, last = self.first_wait_seconds, ""
        for attempt in range(self.num_tries):
            if attempt:
                # Spread, so that many threads do not come back at the same moment.
                self.sleep(min(wait, _LONGEST_WAIT) * (0.5 + random.random()))
                wait = max(2 * wait, self.first_wait_seconds)
            try:
                return read(self._once(path, request))
            except urllib.error.HTTPError as error:
                last = _words(error)
                if error.code not in _BUSY:
                    raise RequestRefusedError(last) from error
                wait = max(wait, _seconds(error.headers.get("Retry-After")))
            # OSError: refused, reset, timed out; ValueError: half an answer, or no JSON.
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as e:
                last = f"{type(e).__name__}: {e}"
        raise ServerGoneError(f"{last[:200]} ({self.num_tries} tries)")

    def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(
            self.url.rstrip("/") + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
        )
        with urllib.request.urlopen(request, timeout=self.timeout_seconds) as answer:
            return json.loads(answer.read())


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    message = choice["message"]
    if not isinstance(message, dict) or choice.get("finish_reason") is None:
        raise ValueError("an answer without an end")
    return {
        "message": message,
        "finish_reason": choice["finish_reason"],
        "token_ids": choice.get("token_ids"),
        "prompt_token_ids": answer.get("prompt_token_ids"),
    }


def _words(error: urllib.error.HTTPError) -> str:
    """The server's own words, as far as it has some."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        text = ""
    try:
        value = json.loads(text)
        text = value.get("error", value).get("message", text)
    except (ValueError, AttributeError):
        pass
    return f"HTTP {error.code}: {str(text)[:200]}"


def _seconds(header: str | None) -> float:
    try:
        return float(header or 0)
    except ValueError:  # a date
        return 0.0
