"""The bytes of a streamed completion, as vLLM's OpenAI route sends them, turned into counts of tokens. Pure.

Invariants
- Tokens are counted by the engine's own running usage, not by events: an event may bring several tokens, and a token
  may bring no text.
- A stream is whole only with its end marker, and after it nothing counts.
- More tokens than were asked for are no answer. Memory is bounded by EVENT_BYTES_MAX, whatever is fed.
"""

from __future__ import annotations

import json
from typing import Any

EVENT_BYTES_MAX = 2**20


class StreamBroken(Exception):
    """The bytes are no stream of tokens, or the engine says in it that it failed."""


class CompletionStream:
    """One answer as it arrives: its `tokens` so far, whether it is `whole`, and why the engine ended it."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self.tokens = 0
        self.whole = False
        self.finish_reason: str | None = None
        self._left = b""

    def feed(self, data: bytes) -> None:
        """Take what has arrived. Raises StreamBroken; tokens before the break have been counted."""
        *events, self._left = (self._left + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if self.whole:
                raise StreamBroken("an event after the end")
            # A comment, by which proxies keep a connection open.
            if not event.startswith(b":"):
                self._take(event)
        if len(self._left) > EVENT_BYTES_MAX:
            raise StreamBroken(f"an event of more than {EVENT_BYTES_MAX} bytes")

    def _take(self, event: bytes) -> None:
        payload = event.removeprefix(b"data:").strip()
        if not event.startswith(b"data:"):
            raise StreamBroken(f"an event that begins with {event[:20]!r}")
        if payload == b"[DONE]":
            self.whole = True
            return
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            raise StreamBroken(f"an event that is not JSON: {payload[:40]!r}") from None
        if not isinstance(message, dict):
            raise StreamBroken(f"an event that is not an object: {payload[:40]!r}")
        if "error" in message:
            raise StreamBroken(f"the engine failed: {str(message['error'])[:300]}")
        self._count(message)

    def _count(self, message: dict[str, Any]) -> None:
        try:
            tokens = message["usage"]["completion_tokens"]
            reasons = [choice.get("finish_reason") for choice in message["choices"]]
        except (KeyError, TypeError, AttributeError):
            raise StreamBroken(f"an event without choices or running usage: {str(message)[:100]}") from None
        if not isinstance(tokens, int) or not self.tokens <= tokens <= self._tokens_max:
            raise StreamBroken(f"usage of {tokens!r} tokens after {self.tokens}, of {self._tokens_max} at most")
        self.tokens = tokens
        for reason in reasons:
            if reason is not None:
                self.finish_reason = str(reason)
