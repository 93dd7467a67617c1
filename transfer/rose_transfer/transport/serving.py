"""The server behind every transport that runs over streams: accepts peers, and has what they share.

Invariants
- A peer can cost at most what `ServerLimits` says, and nothing that it does ends the server or another connection.
- Objects are read in threads of the server's own, so a slow disk holds up neither the loop nor other sources.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rose.errors import ClusterError, ContractError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_transfer.transport.auth import checked_token
from rose_transfer.transport.frames import PIECE_BYTES_MAX
from rose_transfer.transport.interface import Announcement, ObjectSource, PreparingSource
from rose_transfer.transport.link import Link
from rose_transfer.transport.mismatch import Mismatch
from rose_transfer.transport.peer import Peer
from rose_transfer.transport.places import Places
from rose_transfer.transport.server_session import Announced, Entered, GiveWay, ServerLimits
from rose_transfer.transport.token_bucket import TokenBucket

# A way that is checked reads every object that it leads over: a model of 1 TB at 300 MB/s.
_PREPARE_S = 3600.0
_READERS = 4
_CLOSE_S = 1.0
_TOLD_MAX = 256
_FULL_EVERY_S = 60.0


class StreamServer(ABC):
    """Serves the objects of `source` to whoever knows `token`. Used from one event loop.

    `bandwidth_bytes_per_s` caps what all peers together are sent. `name` is what waits and logs call it.
    """

    def __init__(
        self,
        source: ObjectSource,
        *,
        token: str,
        waits: WaitBoard,
        name: str,
        bandwidth_bytes_per_s: float | None,
        limits: ServerLimits,
    ) -> None:
        self.source = source
        self.waits = waits
        self.name = name
        self.limits = limits
        self.bucket = TokenBucket(bandwidth_bytes_per_s, PIECE_BYTES_MAX) if bandwidth_bytes_per_s else None
        self.readers = ThreadPoolExecutor(_READERS, thread_name_prefix="rose-read")
        self.token = checked_token(token)
        self.newest: Announcement | None = None
        self._peers: set[Peer] = set()
        self._places: Places[Peer] = Places(limits.connections_max)
        self._full_told_s: float | None = None
        self._told: set[tuple[str, str]] = set()
        self._server: asyncio.Server | None = None
        self._closed = False

    @abstractmethod
    async def _listen(self, make_link: Callable[[], Link]) -> asyncio.Server:
        """Bind. Raises OSError."""

    def find(self, key: str) -> tuple[int, str]:
        """Size and path of a file that holds the object. Called in a reader thread. Raises RoseError or OSError."""
        raise ContractError(f"{self.name} hands over no files")

    async def prepare(self, key: str) -> None:
        """Have the source make an object that is made when it is asked for. Raises RoseError."""
        if isinstance(self.source, PreparingSource):
            preparing = self.source.prepare(key)
            await self.waits.within(preparing, f"{key} to be made", "the store", _PREPARE_S, boundary="transfer")

    @property
    def local(self) -> bool:
        """Whether peers may ask for files."""
        return False

    @property
    def path(self) -> str:
        """The name of what pieces cross by, beside the connection; empty if they cross on it."""
        return ""

    @property
    def connections(self) -> int:
        return len(self._peers)

    async def start(self) -> None:
        """Raises ClusterError if the address cannot be bound."""
        try:
            self._server = await self._listen(lambda: self.make_peer().link)
        except OSError as error:
            raise ClusterError(
                f"{self.name} cannot listen: {error}", to_do="choose another address or end who holds it"
            ) from error

    def announce(self, newest: Announcement) -> None:
        """Raises ContractError if the version does not rise."""
        if self.newest is not None and newest.version <= self.newest.version:
            raise ContractError(f"announced {newest} after {self.newest}", expected="rising versions")
        self.newest = newest
        for peer in tuple(self._peers):
            peer.step(Announced(newest))

    async def close(self) -> None:
        """Cut every connection. Receivers try again until their own deadline."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        ending = [task for peer in tuple(self._peers) for task in peer.end()]
        if ending:
            with self.waits.waiting("end of its peers", self.name, _CLOSE_S):
                await asyncio.wait(ending, timeout=_CLOSE_S)
        # Not cancelled: the objects that the peers had open are closed there.
        self.readers.shutdown(wait=False)

    def tell_of(self, mismatch: Mismatch, peer: str) -> None:
        """Log that a client is turned away: as a warning once for each host and reason, since clients try again."""
        said = (peer.rpartition(":")[0], mismatch.what)
        known = said in self._told or len(self._told) == _TOLD_MAX
        self._told |= set() if known else {said}
        say = logger("transfer").info if known else logger("transfer").warning
        say("peer does not fit", server=self.name, peer=peer, why=mismatch.what, to_do=mismatch.to_do)

    def make_peer(self) -> Peer:
        """What stands for one connection."""
        return Peer(self)

    def admit(self, peer: Peer) -> bool:
        """Whether a peer may come as far as to say who it is."""
        if self._closed or len(self._peers) - len(self._places) >= self.limits.connections_max:
            return False
        self._peers.add(peer)
        return True

    def enter(self, peer: Peer) -> None:
        """Let a peer in, perhaps in place of another, or send it away."""
        if self._places.full:
            leaver = self._places.leaver_for(peer)
            if leaver is None:
                self._send_away(peer)
                return
            leaver.step(GiveWay("another client needs the place of this connection"))
        self._places.enter(peer)
        peer.step(Entered())

    def leave(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._places.leave(peer)

    def _send_away(self, peer: Peer) -> None:
        clients = self._places.clients
        if self._places.has(peer.session.client):
            peer.step(GiveWay("there is no room for further connections of one client"))
            return
        peer.step(GiveWay(f"it has {clients} clients, as many as it takes; put a relay between"))
        now = asyncio.get_running_loop().time()
        if self._full_told_s is None or now - self._full_told_s >= _FULL_EVERY_S:
            self._full_told_s = now
            logger("transfer").warning(
                "clients are sent away",
                server=self.name,
                why=f"{clients} are connected, as many as it takes",
                to_do="let some follow a relay, or raise connections_max",
            )
