"""Asks one address for its metrics, again and again, whatever it answers.

Invariants
- One look takes `timeout_s` at most and reads `BYTES_MAX` at most; nothing is followed elsewhere.
- An address that hangs, floods or answers nonsense is a `problem` in words, and costs the others nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import ClientSession

from rose.errors import DeadlineExceeded
from rose.observer.exposition import Samples, UnreadableMetrics, parsed
from rose.observer.figures import WANTED
from rose.waits import WaitBoard

EVERY_S = 1.0
EVERY_MAX_S = 3.0
_PATIENCE = 30
"""An address that takes long to answer has other things to do: it is asked after so many times as long."""
TIMEOUT_S = 3.0
BYTES_MAX = 4 << 20
_CHUNK = 1 << 16
# The format is asked for, since a vLLM engine's names lose their colon in others.
_HEADERS = {"Accept": "text/plain;version=0.0.4"}


def every_s(took_s: float) -> float:
    """How long after the beginning of a look that took so long the next one begins."""
    return min(max(EVERY_S, _PATIENCE * took_s), EVERY_MAX_S)


class Scraper:
    """One address, named by `whom` it belongs to. `problem` is what the last look failed for, "" if it did not."""

    def __init__(
        self,
        url: str,
        whom: str,
        http: ClientSession,
        waits: WaitBoard,
        *,
        scraped: Callable[[Samples], None],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.url = url
        self.problem = "not asked yet"
        self._whom = whom
        self._http = http
        self._waits = waits
        self._scraped = scraped
        self._timeout_s = timeout_s

    async def run(self) -> None:
        """Look every `EVERY_S`, or less often where answers are slow, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            await self.look()
            took_s = loop.time() - began_s
            await asyncio.sleep(max(0.0, every_s(took_s) - took_s))

    async def look(self) -> None:
        """Ask once."""
        try:
            text = await self._waits.within(self._text(), "metrics", self._whom, self._timeout_s, boundary="cluster")
            self._scraped(parsed(text, WANTED))
        except DeadlineExceeded:
            self.problem = f"no answer within {self._timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - an address may make the client stumble over anything
            self.problem = str(error) or type(error).__name__
        else:
            self.problem = ""

    async def _text(self) -> str:
        if urlsplit(self.url).scheme != "http":
            raise UnreadableMetrics(f"{self.url!r} is no http address")
        body = bytearray()
        async with self._http.get(self.url, headers=_HEADERS, allow_redirects=False) as answer:
            if answer.status != 200:
                raise UnreadableMetrics(f"it answered with status {answer.status}")
            async for chunk in answer.content.iter_chunked(_CHUNK):
                body += chunk
                if len(body) > BYTES_MAX:
                    raise UnreadableMetrics(f"it answers with more than {BYTES_MAX >> 20} MiB")
        return body.decode("utf-8", "replace")
