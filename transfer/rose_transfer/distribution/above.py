"""What a relay asks of its upstream beside versions: which relays are above it, and what versions must answer.

Invariants
- A relay that follows itself, at once or over others, says so.
- Answers are passed on as they came: whoever asked reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from rose.errors import DeadlineExceeded, TransferError
from rose_transfer.distribution import ancestry, known_answer
from rose_transfer.distribution.subscription import log
from rose_transfer.transport.interface import ObjectClient, ObjectMissing
from rose_transfer.transport.landing import MemoryLanding

_ANSWER_S = 10.0
_LOOK_TURNS_MAX = 64


class Above:
    """Of one relay, by the `client` of its upstream. From one event loop."""

    def __init__(self, client: ObjectClient, watch_s: float) -> None:
        self._client = client
        self._watch_s = watch_s
        self._id = secrets.token_hex(16)
        self._relays, self._follows_itself = tuple[str, ...](), False
        self._turns_to_look = self._turns_between = 1
        self._asking: dict[str, asyncio.Task[bytes | None]] = {}

    def relays(self) -> tuple[str, ...]:
        """This one, and those above it, nearest first."""
        return (self._id, *self._relays)

    async def answer(self, key: str) -> bytes | None:
        """None if the upstream knows none.

        All who ask at the same time share one question: a relay that follows itself would ask itself for ever.
        """
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.create_task(self._ask(key))
            asking.add_done_callback(lambda _: self._asking.pop(key))
        return await asyncio.shield(asking)

    async def _ask(self, key: str) -> bytes | None:
        landing = MemoryLanding(bytes_max=known_answer.TEXT.bytes_max)
        try:
            await self._client.fetch(key, landing, deadline_s=_ANSWER_S)
        except ObjectMissing:
            return None
        except DeadlineExceeded as error:
            raise TransferError(f"what a version answers is not heard of: {error.what}") from error
        return bytes(landing.bytes_view)

    async def look_up(self) -> None:
        """Learn which relays are above this one, and say so if it is among them itself.

        Called whenever no news came. Each time that nothing has changed it pauses for twice as many calls: to ask opens
        all of the client's connections.
        """
        self._turns_to_look -= 1
        if self._turns_to_look:
            return
        landing = MemoryLanding(bytes_max=ancestry.TEXT.bytes_max)
        heard: tuple[str, ...] = ()
        # An upstream that does not know the question, or is away, is no news.
        with contextlib.suppress(TransferError, DeadlineExceeded):
            await self._client.fetch(ancestry.ask_key(secrets.token_hex(16)), landing, deadline_s=self._watch_s)
            heard = ancestry.from_bytes(bytes(landing.bytes_view))
        follows_itself = self._id in heard
        if follows_itself and not self._follows_itself:
            log.warning("this relay follows itself: nothing new will come", relays_between=heard.index(self._id))
        above = ancestry.before(self._id, heard)
        unchanged = (above, follows_itself) == (self._relays, self._follows_itself)
        self._turns_between = min(2 * self._turns_between, _LOOK_TURNS_MAX) if unchanged else 1
        self._turns_to_look = self._turns_between
        self._relays, self._follows_itself = above, follows_itself
