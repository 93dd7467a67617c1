"""Pieces that cross beside the connection: what a faster path within a cluster must offer.

A client asks for a piece over TCP as ever (GET). Instead of sending its bytes (DATA), the server makes them ready on
the other path and says so (LENT: length, checksum, place); the client takes them from there, checks them, puts them
in place and says so (TAKEN). Before the first LENT of a connection the server says how to take (OFFER). Keys, sizes,
the token, watches, deadlines and what becomes of a cut are therefore those of TCP; see `carried`.

A *lender* belongs to one server and a *giver* to one of its connections; a *borrower* belongs to one client and a
*taker* to one of its connections.

Invariants
- A connection has a few pieces lent at once, and they are taken one after another in the order in which they were
  lent. When one goes wrong the connection is cut, and a new one gets a new giver and a new taker.
- What a taker hands out is not yet checked: the checksum in LENT decides.
- After `cut` a giver or taker touches nothing that others use, however its peer behaves.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from rose_transfer.transport.messages import Lent


class Giver(Protocol):
    """The server's end of one connection. Used from the server's loop."""

    offer: bytes

    def lend(self, payload: bytes | bytearray | memoryview) -> AbstractAsyncContextManager[int]:
        """Within, the payload can be taken at the place that is given; the body waits until it was, then leaves.

        Raises TransferError or DeadlineExceeded if the path is of no use.
        """
        ...

    def cut(self) -> None: ...


class Lender(Protocol):
    path: str
    """The name of the path, the same at lenders and borrowers that fit: a word of up to 16 letters and digits."""

    def check_peer(self, *, is_near: bool) -> None:
        """Raises TransferError if a client of this host, or of another, is not to be lent anything."""
        ...

    def giver(self) -> Giver:
        """Raises TransferError if this machine has no such path."""
        ...

    def close(self) -> None:
        """No giver of it is used any more."""
        ...


class Taker(Protocol):
    """The client's end of one connection."""

    def take(self, lent: Lent, deadline_s: float) -> memoryview:
        """The piece's bytes, in memory that stays theirs until the next call. Called in a thread, never two at once.

        Raises TransferError or DeadlineExceeded, within `deadline_s` seconds, or soon after `cut`.
        """
        ...

    def cut(self) -> None:
        """Called from any thread, perhaps while a piece is taken."""
        ...


class Borrower(Protocol):
    path: str

    def taker(self, offer: bytes) -> Taker:
        """Quick. Raises TransferError if the offer is of no use here."""
        ...
