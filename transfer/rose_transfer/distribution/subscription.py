"""What a server offers, as news.

Invariants
- The newest version comes first and none twice in a row; what was overtaken is skipped.
- A server that is away, or that answers nothing, is asked on for ever. The open wait says so, and the log says it once:
  at the beginning within `_FIRST_S`.
- What a server announces that is no offer is passed over, and the log says so: it may be replaced by one of weights.
- A server that counts from the beginning again is noticed, though its numbers are lower: each time that no news came
  in time, the newest version of all is asked for as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from rose.errors import DeadlineExceeded
from rose.logs import logger
from rose_transfer.distribution.offer import MalformedOffer, Offer, offer_of
from rose_transfer.transport.interface import ObjectClient

_FIRST_S = 2.0
log = logger("weights")


class Subscription:
    """Asks `client` for news; the server may hold each question for `watch_s` seconds."""

    def __init__(self, client: ObjectClient, watch_s: float) -> None:
        self._client = client
        self._watch_s = watch_s
        self._asked = False

    async def offers(self, after: Offer | None) -> AsyncIterator[Offer]:
        """What is newest, whenever that is another one than `after` and than the last. Never ends by itself.

        Raises as `next`.
        """
        last = after
        while True:
            offer = await self.next(last)
            if offer is not None:
                last = offer
                yield offer

    async def next(self, after: Offer | None) -> Offer | None:
        """The newest version as soon as it is another one than `after`, None if it was not for a while.

        Raises Refused, or TransferError if the client was closed.
        """
        newest = await self._newest(0 if after is None else after.version + 1)
        if newest is None and after is not None:
            newest = await self._newest(0)
        return None if newest == after else newest

    async def _newest(self, at_least: int) -> Offer | None:
        away = False
        while True:
            watch_s = self._watch_s if self._asked else min(_FIRST_S, self._watch_s)
            self._asked = True
            try:
                announced = await self._client.watch(at_least, deadline_s=watch_s)
            except DeadlineExceeded as error:
                if not away:
                    log.warning("no answer about new weights; asking on", why=str(error))
                away = True
                continue
            if away:
                log.info("the server of new weights answers again")
            if announced is None:
                return None
            try:
                return offer_of(announced)
            except MalformedOffer as error:
                log.warning("an announcement is passed over", why=str(error))
                # The server holds the question for whatever follows.
                at_least = announced.version + 1
