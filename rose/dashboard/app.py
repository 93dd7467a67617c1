"""What the dashboard answers over HTTP: the page, its data, and how it is itself.

Invariants
- It answers requests that name a loopback host and nothing else, so that no page of another site can have a browser
  read it by a name that leads here.
- The page loads from here alone, and runs no script but the files served here: its policy forbids all else.
- Nothing can be changed through it: there is no method but GET.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose.dashboard.hub import Hub

HEALTHY_WITHIN_S = 5.0
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
_HOSTS = {"127.0.0.1", "localhost", "[::1]"}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


def make_app(hub: Hub, registry: CollectorRegistry, now_s: Callable[[], float] = time.time) -> ASGIApp:
    """Serves what `hub` is told. `registry` is shown at /metrics."""
    # Its own pages of documentation load from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    assets = _assets()

    @app.get("/")
    async def page() -> Response:
        return asset("index.html")

    @app.get("/assets/{name}")
    async def asset_named(name: str) -> Response:
        return asset(name)

    def asset(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404)
        return Response(assets[name], media_type=_TYPES[name.rpartition(".")[2]])

    @app.get("/api/state")
    async def state() -> Response:
        return JSONResponse(hub.whole())

    @app.get("/api/events")
    async def events() -> Response:
        if hub.full:
            return PlainTextResponse("too many pages are open\n", 503)
        return StreamingResponse(hub.events(), media_type="text/event-stream")

    @app.get("/healthz")
    async def healthz() -> Response:
        age_s = None if hub.at_s is None else now_s() - hub.at_s
        if age_s is None or age_s > HEALTHY_WITHIN_S:
            since = "not looked yet" if age_s is None else f"not looked for {age_s:.0f} s"
            return PlainTextResponse(f"{since}\n", 503)
        return PlainTextResponse("ok\n")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return _Guard(app)


def _assets() -> dict[str, bytes]:
    """Every file of the page by its name; uPlot is the one that reports carry."""
    places: list[Traversable] = [
        files("rose.dashboard") / "assets",
        files("rose.dashboard") / "assets" / "vendor",
        files("rose.report") / "assets" / "uplot",
    ]
    return {
        file.name: file.read_bytes()
        for place in places
        for file in place.iterdir()
        if file.is_file() and file.name.rpartition(".")[2] in _TYPES
    }


class _Guard:
    """Turns strangers away, and puts the page's policy on every answer."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        if _host(scope) in _HOSTS:
            await self._inner(scope, receive, guarded)
        else:
            refusal = PlainTextResponse("this dashboard answers as localhost and 127.0.0.1 alone\n", 421)
            await refusal(scope, receive, guarded)


def _host(scope: Scope) -> str:
    """The Host header without its port, "" where there is none."""
    header = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
    name, _, port = header.rpartition(":")
    return name if name and port.isdecimal() else header
