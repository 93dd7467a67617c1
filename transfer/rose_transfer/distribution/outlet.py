"""A store and the servers that offer it: what a publisher and a relay have in common.

Invariants
- A version is announced once it is whole on disk, and only if its number rises.
- Once closed and opened again everything may be offered, lower numbers too: every connection was cut in between, so no
  receiver takes one lineage for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rose_transfer.distribution.offer import Offer
from rose_transfer.distribution.source import Answers, StoreSource, no_answers
from rose_transfer.store import Store
from rose_transfer.transport.interface import ObjectServer, ObjectSource

MakeServer = Callable[[ObjectSource], ObjectServer]
"""For example `partial(TcpServer, token=token, waits=waits, port=7070)`.

Called again by a relay that begins another lineage, after the server made before was closed. So it must make what
closes with that server too, an `RdmaLender` say.
"""


class Outlet:
    """Offers `store` on servers that `serve` makes, from `open` until `close`, after which it may be opened again.

    The store is not closed with it. `relays` and `answers` as for `StoreSource`.
    """

    def __init__(
        self,
        store: Store,
        serve: Sequence[MakeServer],
        relays: Callable[[], Sequence[str]] = tuple,
        answers: Answers = no_answers,
    ) -> None:
        self._store = store
        self._relays = relays
        self._answers = answers
        self._serve = tuple(serve)
        self._source: StoreSource | None = None
        self._announced: Offer | None = None
        self.servers: tuple[ObjectServer, ...] = ()

    async def open(self) -> None:
        """Start the servers, and offer what is there. Raises ClusterError if an address cannot be bound."""
        self._source = StoreSource(self._store, self._relays, self._answers)
        started: list[ObjectServer] = []
        try:
            for make in self._serve:
                server = make(self._source)
                await server.start()
                started.append(server)
        finally:
            self.servers = tuple(started)
        self.announce_newest()

    async def close(self) -> None:
        """Cut every connection; receivers ask again until their own deadlines."""
        for server in self.servers:
            await server.close()
        self.servers = ()
        self._announced = None
        if self._source is not None:
            self._source.close()

    def announce_newest(self) -> None:
        """Offer the newest version, if it has not been."""
        newest = self._store.newest
        if newest is None or (self._announced is not None and newest <= self._announced.version):
            return
        self._announced = Offer(newest, self._store.fingerprint(newest))
        for server in self.servers:
            server.announce(self._announced.announcement)
