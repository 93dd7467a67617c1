"""Whose connection leaves a server that is full, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from rose_transfer.transport import auth
from rose_transfer.transport import server_session as server
from rose_transfer.transport.messages import Get, Hello, Watch, to_frame
from rose_transfer.transport.places import Places
from rose_transfer.transport.server_session import ServerLimits, ServerSession

TOKEN, NONCE = b"a token of the tests", bytes(32)


@dataclass(eq=False)
class Guest:
    """Number `number` of a client, which came at that time."""

    client: bytes
    number: int
    session: ServerSession = field(init=False)

    def __post_init__(self) -> None:
        self.session = ServerSession(TOKEN, NONCE, ServerLimits(), local=False)
        nonce = auth.derived_nonce(self.client, self.number)
        hello = Hello(nonce, auth.client_proof(TOKEN, NONCE, nonce))
        assert self.session.step(server.Arrived(to_frame(hello)), float(self.number)) == [server.Enter()]
        self.session.step(server.Entered(), float(self.number))

    def asks(self, message: Get | Watch) -> None:
        self.session.step(server.Arrived(to_frame(message)), 0.0)


def full_of(*guests: Guest) -> Places[Guest]:
    places: Places[Guest] = Places(len(guests))
    for guest in guests:
        assert not places.full
        places.enter(guest)
    assert places.full
    return places


def guests_of(client: bytes, count: int) -> list[Guest]:
    return [Guest(client, number) for number in range(1, count + 1)]


def test_a_new_client_gets_the_place_that_is_longest_idle_of_the_client_that_has_most() -> None:
    many, few = guests_of(b"many", 3), guests_of(b"few", 2)
    assert full_of(*few, *many).leaver_for(Guest(b"new", 9)) is many[0]


def test_a_connection_with_a_watch_goes_after_idle_ones_and_before_those_on_which_pieces_move() -> None:
    moving, watching, idle = guests_of(b"many", 3)
    moving.asks(Get(1, "key", 0, 1))
    watching.asks(Watch(1, 0, 60_000))
    places = full_of(moving, watching, idle)
    assert places.leaver_for(Guest(b"new", 9)) is idle
    places.leave(idle)
    assert places.leaver_for(Guest(b"new", 9)) is watching


def test_the_first_connection_of_a_client_comes_before_further_ones_of_others_even_if_they_move() -> None:
    busy = guests_of(b"many", 2)
    for guest in busy:
        guest.asks(Get(1, "key", 0, 1))
    assert full_of(*busy).leaver_for(Guest(b"new", 9)) is busy[0]


def test_nobody_leaves_where_every_place_is_another_clients() -> None:
    assert full_of(Guest(b"a", 1), Guest(b"b", 1)).leaver_for(Guest(b"new", 9)) is None


def test_a_further_connection_gets_an_idle_place_of_who_has_more_than_it_would_have() -> None:
    own, others = Guest(b"own", 1), guests_of(b"others", 3)
    assert full_of(own, *others).leaver_for(Guest(b"own", 2)) is others[0]
    for guest in others:
        guest.asks(Get(1, "key", 0, 1))
    assert full_of(own, *others).leaver_for(Guest(b"own", 2)) is None
    assert full_of(own, *guests_of(b"others", 2)).leaver_for(Guest(b"own", 2)) is None


def test_who_left_leaves_a_place() -> None:
    one, other = Guest(b"a", 1), Guest(b"b", 1)
    places = full_of(one, other)
    places.leave(one)
    places.leave(one)
    assert (len(places), places.full, places.clients) == (1, False, 1)
    assert places.has(other.session.client)
    assert not places.has(one.session.client)
