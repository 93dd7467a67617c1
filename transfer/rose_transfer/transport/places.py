"""Who may stay connected to a server that takes only so many. A pure core.

Invariants
- At most `most` guests are in.
- Where there is no room, whoever has more connections than others gives one up for whoever has none: a client is sent
  away only while every place belongs to another client.
- A client's further connections come in only where there is room, or for one that is idle of a client that has more.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from rose_transfer.transport.server_session import ServerSession


class Guest(Protocol):
    """A connection whose client has proved that it knows the token."""

    @property
    def session(self) -> ServerSession: ...


G = TypeVar("G", bound=Guest)


class Places(Generic[G]):
    """Guests by their client. Whoever was told to leave is in until `leave`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[bytes, list[G]] = {}

    def __len__(self) -> int:
        return sum(len(guests) for guests in self._of.values())

    @property
    def full(self) -> bool:
        return len(self) >= self._most

    @property
    def clients(self) -> int:
        return len(self._of)

    def has(self, client: bytes) -> bool:
        return client in self._of

    def leaver_for(self, newcomer: G) -> G | None:
        """Whose place a newcomer may have where all are taken: that of the least used connection of who has most."""
        own = len(self._of.get(newcomer.session.client, ()))
        most = max((len(guests) for guests in self._of.values()), default=0)
        if most < 2 or (own and most <= own + 1):
            return None
        candidates = [guest for guests in self._of.values() if len(guests) == most for guest in guests]
        leaver = min(candidates, key=lambda guest: guest.session.use)
        return None if own and leaver.session.use.moving else leaver

    def enter(self, guest: G) -> None:
        self._of.setdefault(guest.session.client, []).append(guest)

    def leave(self, guest: G) -> None:
        """Also of a guest that never entered."""
        guests = self._of.get(guest.session.client, [])
        if guest in guests:
            guests.remove(guest)
            if not guests:
                del self._of[guest.session.client]
