"""How a serving vLLM's probe hears of a request when it arrives, and not a step later: an endpoint plugin.

Invariants
- It looks at a request's method and path, and at nothing else; it adds no route and changes no answer.
- Without a probe that works in this process, nothing is done.

vLLM loads it through its public entry point `vllm.endpoint_plugins`, in the process of the API server, where its stat
loggers are too. Without it (other servers around the engine, more than one API server) a request is first seen after
the step that took it in.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_GENERATING = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/inference/v1/generate", "/generate"),
)
"""Paths, behind whatever root path, that make the engine generate."""


class Listener(Protocol):
    """Who wants to hear of arrivals."""

    def arrived(self, request: int) -> None: ...

    def left(self, request: int) -> None: ...


_listeners: list[Listener] = []


def tell(listener: Listener) -> None:
    """Have a listener of this process hear of arrivals from now on."""
    _listeners.append(listener)


class ArrivalsPlugin:
    """What vLLM loads: see the module."""

    name = "rose_probe"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        app.add_middleware(Arrivals)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Nothing is kept per app."""


class Arrivals:
    """ASGI middleware. Numbers each request that makes the engine generate, from its arrival to its end."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _listeners or not _generates(scope):
            await self._app(scope, receive, send)
            return
        request = next(self._numbers)
        for listener in _listeners:
            listener.arrived(request)
        try:
            await self._app(scope, receive, send)
        finally:
            for listener in _listeners:
                listener.left(request)


def _generates(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and str(scope["path"]).endswith(_GENERATING)
