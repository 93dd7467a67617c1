"""The tier *observe*: the executor itself writes the serving half of the board, from the serving engine's own page.

Invariants
- Nothing is installed in the serving engine. Each look costs it one page: 3.3 ms of its API server's processor, with
  vLLM 0.30 and 0.32 and one engine (a look at its /health: 0.3 ms), and nobody is answered meanwhile. vLLM makes the
  whole page whatever is asked for.
- A probe goes first: while another process writes the half, nothing is asked; and after a look that failed the half is
  given up, so that an engine that starts with a probe finds it free.
- Between two looks the half is renewed, with the state of the last look and its time. It is not renewed while a look
  is under way: a page that does not answer makes the state unknown after the half's own `stale_after_s`.
- Whatever answers there, a huge page, one that never ends or is none, costs the executor no more than
  `_PAGE_BYTES_MAX` and the deadline.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp

from rose.errors import DeadlineExceeded, EngineError, RoseError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.board import HEARTBEAT_S, SERVING, HalfWriter
from rose_executor.board_states import ServingState
from rose_executor.observed_serving import ObservedServing
from rose_executor.serving_page import read_page

log = logger("observer")

EVERY_S = 0.4
"""From the end of one look to the next: so looks take less than one hundredth of the API server's time."""
_PAGE_BYTES_MAX = 1 << 20
_PIECE_BYTES = 1 << 16
_TO_DO = "look there with curl: [serving] metrics must name the page of the serving vLLM"


class ServingObserver:
    """`run` it. `trouble` is what the last look failed at, "" if at nothing."""

    def __init__(self, url: str, board: Path, waits: WaitBoard) -> None:
        self.trouble = ""
        self._url = url
        self._board = board
        self._waits = waits
        self._serving = ObservedServing()
        self._writer: HalfWriter[ServingState] | None = None

    async def run(self) -> None:
        """Look until cancelled. Sleeping between two looks is no wait for anybody, so it has no deadline."""
        # What a page is packed in is not unpacked: nothing small becomes something huge.
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as http:
            try:
                while True:
                    await self._look(http)
                    await self._beat_until(time.monotonic() + EVERY_S)
            finally:
                self._give_up()

    async def _look(self, http: aiohttp.ClientSession) -> None:
        try:
            writer = self._half()
            asked_at_s = time.monotonic()
            page = read_page(await self._page(http))
            if page is None:
                raise EngineError(f"{self._url} does not say how many requests vLLM runs", to_do=_TO_DO)
            if time.monotonic() - asked_at_s > SERVING.stale_after_s:
                raise EngineError("this process stood still: the page is too old to be believed")
            writer.write(self._serving.saw(page, asked_at_s))
        except (RoseError, aiohttp.ClientError, OSError, UnicodeError) as error:
            # The last is of names that no resolver takes, such as `a..b`.
            self._failed(str(error) or type(error).__name__)
        else:
            self.trouble = ""

    async def _page(self, http: aiohttp.ClientSession) -> bytes:
        within_s = SERVING.stale_after_s
        try:
            return await self._waits.within(
                self._fetch(http), "metrics", f"serving engine {self._url}", within_s, boundary="engine"
            )
        except DeadlineExceeded as error:
            raise EngineError(f"{self._url} did not answer whole within {within_s:g} s", to_do=_TO_DO) from error

    async def _fetch(self, http: aiohttp.ClientSession) -> bytes:
        headers = {"Accept-Encoding": "identity"}
        async with http.get(self._url, allow_redirects=False, headers=headers) as answer:
            if answer.status != 200:
                raise EngineError(f"{self._url} answers {answer.status}", expected="200 and a page", to_do=_TO_DO)
            page = bytearray()
            while piece := await answer.content.read(_PIECE_BYTES):
                page += piece
                if len(page) > _PAGE_BYTES_MAX:
                    raise EngineError(f"{self._url} is longer than {_PAGE_BYTES_MAX} bytes", to_do=_TO_DO)
            return bytes(page)

    async def _beat_until(self, end_s: float) -> None:
        # In this order: a process that stood still renews nothing when it goes on.
        while (left_s := end_s - time.monotonic()) > 0:
            if self._writer is not None:
                try:
                    self._writer.write(self._serving.state)
                except OSError as error:
                    self._failed(str(error))
            await asyncio.sleep(min(HEARTBEAT_S, left_s))

    def _failed(self, why: str) -> None:
        if not self.trouble:
            log.warning("the serving engine's page is not read", why=why)
        self.trouble = why
        self._give_up()

    def _half(self) -> HalfWriter[ServingState]:
        """Raises ClusterError where somebody else has it, or there is no whole board."""
        if self._writer is not None and not self._writer.whole():
            self._give_up()
        if self._writer is None:
            self._writer = HalfWriter(self._board, SERVING)
        return self._writer

    def _give_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
