"""Client and server sessions against each other in virtual time, over links that do what links do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rose.driver.core import After
from rose.simulator.link_lines import Trouble
from rose.simulator.link_world import OBJECTS, QUIET_S, LinkWorld
from rose.simulator.linked_pair import FIRST_WATCH, LIMITS, PIECE, TOKEN, LinkedPair
from rose_transfer.transport import auth
from rose_transfer.transport import client_events as client
from rose_transfer.transport import server_session as server
from rose_transfer.transport.client_session import ClientSession
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.interface import Announcement, Refused
from rose_transfer.transport.messages import (
    Challenge,
    Data,
    Fail,
    FailCode,
    Get,
    Hello,
    Locate,
    Message,
    News,
    Place,
    Watch,
    Welcome,
    to_frame,
)
from rose_transfer.transport.server_session import ServerLimits, ServerSession

SEEDS = 240
SOON_S = 5.0
NONCE = bytes(32)
ONE_STREAM = ClientLimits(streams=1, window=2, piece_bytes=PIECE, greet_s=0.5, stall_s=1.0, retry_s=0.05)


def fetching(**settings: Any) -> LinkedPair:
    pair = LinkedPair(0, OBJECTS, **settings)
    pair.driver.call(0.0, "", lambda: pair.fetch(1, "long"))
    return pair


@pytest.mark.parametrize("block", range(8))
def test_whatever_links_do_every_ask_ends_well_once_they_are_calm(block: int) -> None:
    for seed in range(block * SEEDS // 8, (block + 1) * SEEDS // 8):
        LinkWorld(seed).run()


@pytest.mark.parametrize("kill", [False, True], ids=["connection", "server"])
def test_a_cut_at_every_frame_boundary_costs_no_more_than_what_was_under_way(kill: bool) -> None:
    whole = fetching()
    whole.driver.run(SOON_S)
    size = len(OBJECTS["long"])
    assert whole.server.served_bytes == size, "without faults nothing is sent twice"
    for frame in range(whole.lines.frames):
        pair = fetching(trouble=Trouble(cut_frame=frame), kill=kill)
        pair.driver.run(SOON_S)
        pair.check_ended({1})
        under_way = pair.limits.streams * pair.limits.window * PIECE
        assert pair.server.served_bytes <= size + (under_way if kill else pair.limits.window * PIECE), frame


def test_pieces_are_striped_over_all_streams() -> None:
    pair = fetching()
    pair.driver.run(QUIET_S)
    by_line = {
        number: sum(f"{number} ← Data" in line for line in pair.driver.trace()) for number in pair.lines.numbers()
    }
    assert len(by_line) == 3
    assert min(by_line.values()) >= 8


def test_a_resumed_fetch_asks_only_for_the_rest() -> None:
    pair = LinkedPair(0, OBJECTS)
    pair.driver.call(0.0, "", lambda: pair.fetch(1, "long", resume_from=1000))
    pair.driver.run(QUIET_S)
    pair.check_ended({1})
    assert pair.server.served_bytes == len(OBJECTS["long"]) - 1000


def test_a_silent_server_is_left_and_another_link_tried() -> None:
    pair = fetching(trouble=Trouble(mute=1.0))
    pair.driver.run(QUIET_S)
    pair.check_ended({1})
    assert sum(why.startswith("silence") for why in pair.drops) >= 3


def test_a_wrong_token_is_refused_at_once_and_nothing_is_served() -> None:
    pair = fetching(server_token=b"another token altogether")
    pair.driver.run(QUIET_S)
    end = pair.ended[1]
    assert isinstance(end, client.Failed)
    assert isinstance(end.error, Refused)
    assert pair.server.served_bytes == 0
    assert TOKEN.decode() not in str(end.error)


def test_an_object_that_changes_its_size_is_not_taken() -> None:
    objects = {"long": OBJECTS["long"]}
    pair = LinkedPair(0, objects, limits=ONE_STREAM)
    pair.driver.call(0.0, "", lambda: pair.fetch(1, "long"))
    pair.driver.call(0.15, "another size", lambda: objects.update(long=OBJECTS["long"] + b"more"))
    pair.driver.run(5.0)
    end = pair.ended[1]
    assert isinstance(end, client.Failed)
    assert "not 2577" in str(end.error)


def test_a_long_wait_for_news_is_no_silence() -> None:
    pair = LinkedPair(0, OBJECTS)
    pair.driver.call(0.0, "", lambda: pair.driver.feed(client.WatchAsked(1, 0, 30.0)))
    pair.driver.call(20.0, "version 0", lambda: pair.server.announce(0))
    pair.driver.run(QUIET_S)
    assert pair.ended[1] == client.Told(1, Announcement(0, "manifest-0"))
    assert pair.drops == []
    assert len(pair.lines.numbers()) == 1, "a watch needs one connection"


def welcomed() -> ClientSession:
    """A session whose link 1 has asked for the first piece of fetch 1, at time 0."""
    session = ClientSession(TOKEN, NONCE, ONE_STREAM)
    welcome(session)
    return session


def welcome(session: ClientSession) -> None:
    session.step(client.FetchAsked(1, "long", 0, None), 0.0)
    session.step(client.Connected(1), 0.0)
    hello = session.step(client.Arrived(1, to_frame(Challenge(NONCE))), 0.0)[0]
    assert isinstance(hello, client.Send)
    assert isinstance(hello.message, Hello)
    proof = auth.server_proof(TOKEN, NONCE, hello.message.nonce)
    actions = session.step(client.Arrived(1, to_frame(Welcome(proof))), 0.0)
    assert client.Send(1, Get(1, "long", 0, PIECE)) in actions


@pytest.mark.parametrize(
    "lie",
    [
        Data(1, 1, 1000, bytes(PIECE)),
        Data(1, 0, 1000, bytes(PIECE - 1)),
        Data(1, 0, 1000, bytes(PIECE + 1)),
        Data(1, 0, 1000, b""),
        Data(2, 0, 1000, bytes(PIECE)),
        News(1, None),
        Place(1, 1000, "/etc/passwd"),
        Fail(9, FailCode.MISSING, "what?"),
        Welcome(NONCE),
        Challenge(NONCE),
    ],
    ids=repr,
)
def test_a_server_that_answers_something_else_is_dropped_and_asked_again(lie: Message) -> None:
    session = welcomed()
    actions = session.step(client.Arrived(1, to_frame(lie)), 0.1)
    assert any(isinstance(action, client.Drop) for action in actions)
    assert not any(isinstance(action, client.Grown | client.Fetched | client.Failed) for action in actions)
    assert client.Connect(2) in session.step(client.Retry(1), 0.2)


def test_what_comes_from_a_dropped_link_changes_nothing() -> None:
    session = welcomed()
    session.step(client.Lost(1, "cut"), 0.1)
    late = [client.Arrived(1, to_frame(Data(1, 0, 1000, bytes(PIECE)))), client.Lost(1, "cut again"), client.Heard(1)]
    assert [session.step(event, 0.1) for event in late] == [[], [], []]
    assert session.asked(1, 1) is None


def test_silence_counts_from_the_request_not_from_the_quiet_before_it() -> None:
    session = welcomed()
    session.step(client.Arrived(1, to_frame(Data(1, 0, 5, b"short"))), 0.1)
    session.step(client.WatchAsked(2, 0, 60.0), 100.0)
    assert not any(isinstance(action, client.Drop) for action in session.step(client.Tick(), 100.9))
    assert client.Drop(1, "silence") in session.step(client.Tick(), 101.0)


def test_a_cancelled_fetch_is_read_past_and_the_link_kept() -> None:
    session = welcomed()
    session.step(client.Cancelled(1), 0.1)
    assert session.asked(1, 1) is None
    assert session.step(client.Arrived(1, to_frame(Data(1, 0, 1000, bytes(PIECE)))), 0.2) == []
    assert client.Send(1, Get(2, "even", 0, PIECE)) in session.step(client.FetchAsked(2, "even", 0, None), 0.3)


def test_a_link_that_gives_way_to_another_client_costs_no_more_than_what_was_under_way_on_it() -> None:
    pair = fetching()
    pair.driver.call(0.15, "another client comes", lambda: pair.server.crowd(1, SOON_S))
    pair.driver.run(SOON_S)
    pair.check_ended({1})
    assert any("for another" in drop for drop in pair.drops)
    assert pair.server.served_bytes <= len(OBJECTS["long"]) + pair.limits.window * PIECE


def test_an_object_that_one_link_has_room_for_takes_one() -> None:
    pair = LinkedPair(0, OBJECTS)
    pair.driver.call(0.0, "", lambda: pair.fetch(1, "short"))
    pair.driver.run(SOON_S)
    pair.check_ended({1})
    assert len(pair.lines.numbers()) == 1


def test_links_beyond_the_first_are_given_up_once_they_are_idle_and_that_of_a_watch_is_kept() -> None:
    pair = fetching()
    pair.driver.call(0.1, "", lambda: pair.driver.feed(client.WatchAsked(FIRST_WATCH, 9, 30.0)))
    pair.driver.call(8.0, "version 9", lambda: pair.server.announce(9))
    pair.driver.run(QUIET_S)
    pair.check_ended({1, FIRST_WATCH})
    assert pair.drops == ["idle", "idle"]
    assert len(pair.lines.numbers()) == 3


def test_a_link_is_kept_where_all_are_idle() -> None:
    pair = fetching()
    pair.driver.run(LIMITS.spare_s + 2.0)
    assert pair.drops == ["idle", "idle"]


def test_a_server_without_room_for_more_links_is_left_alone_while_one_works() -> None:
    session = ClientSession(TOKEN, NONCE, ClientLimits(streams=2, window=1, piece_bytes=PIECE, spare_s=9.0))
    welcome(session)
    actions = session.step(client.Arrived(1, to_frame(Data(1, 0, 1000, bytes(PIECE)))), 0.0)
    assert client.Connect(2) in actions, "there is more to ask for than one link has room for"
    session.step(client.Connected(2), 0.0)
    full = client.Arrived(2, to_frame(Fail(0, FailCode.FULL, "full")))
    assert session.step(full, 0.0) == [client.Drop(2, "refused: full"), After(9.0, client.Retry(1))]
    assert client.Connect(3) in session.step(client.Retry(1), 9.0)


def test_a_server_without_room_at_all_is_tried_again_ever_more_patiently() -> None:
    session = ClientSession(TOKEN, NONCE, ClientLimits(retry_s=1.0, retry_s_max=3.0))
    session.step(client.FetchAsked(1, "long", 0, None), 0.0)
    rests = []
    for link in (1, 2, 3, 4):
        actions = session.step(client.Arrived(link, to_frame(Fail(0, FailCode.FULL, "full"))), 0.0)
        rests += [action.delay_s for action in actions if isinstance(action, After)]
        assert client.Connect(link + 1) in session.step(client.Retry(link), 0.0)
    assert rests == [1.0, 2.0, 3.0, 3.0]


def test_what_is_lost_while_a_link_is_rested_for_is_not_rested_for_as_long() -> None:
    session = ClientSession(TOKEN, NONCE, ClientLimits(streams=2, window=1, piece_bytes=PIECE, spare_s=9.0))
    welcome(session)
    session.step(client.Arrived(1, to_frame(Data(1, 0, 1000, bytes(PIECE)))), 0.0)
    session.step(client.Arrived(2, to_frame(Fail(0, FailCode.FULL, "full"))), 0.0)
    assert After(0.1, client.Retry(2)) in session.step(client.Lost(1, "cut"), 0.0)
    assert client.Connect(3) in session.step(client.Retry(2), 0.1)
    assert session.step(client.Retry(1), 9.0) == [], "that rest was over before"


def afters(actions: Sequence[server.ServerAction]) -> list[After[server.ServerEvent]]:
    return [action for action in actions if isinstance(action, After)]


def greeted_server(limits: ServerLimits | None = None) -> ServerSession:
    session = ServerSession(TOKEN, NONCE, limits or ServerLimits(), local=False)
    session.step(server.Began(), 0.0)
    hello = Hello(NONCE, auth.client_proof(TOKEN, NONCE, NONCE))
    assert session.step(server.Arrived(to_frame(hello)), 0.0) == [server.Enter()]
    assert isinstance(session.step(server.Entered(), 0.0)[0], server.Send)
    return session


@pytest.mark.parametrize("message", [Get(1, "k", 0, 1), Watch(1, 0, 0), Locate(1, "k")], ids=repr)
def test_a_server_does_nothing_before_hello(message: Message) -> None:
    session = ServerSession(TOKEN, NONCE, ServerLimits(), local=True)
    session.step(server.Began(), 0.0)
    session.step(server.Announced(Announcement(1, "m")), 0.0)
    assert [type(action) for action in session.step(server.Arrived(to_frame(message)), 0.0)] == [server.Close]
    assert session.step(server.Arrived(to_frame(message)), 0.0) == ()


def test_request_numbers_must_rise() -> None:
    session = greeted_server()
    assert session.step(server.Arrived(to_frame(Get(2, "k", 0, 1))), 0.0) == [server.Serve(2, "k", 0, 1)]
    actions = session.step(server.Arrived(to_frame(Get(2, "k", 0, 1))), 0.0)
    assert [type(action) for action in actions] == [server.Close]


def test_files_are_handed_over_on_one_host_only() -> None:
    actions = greeted_server().step(server.Arrived(to_frame(Locate(1, "k"))), 0.0)
    assert isinstance(actions[0], server.Send)
    assert isinstance(actions[0].message, Fail)
    assert actions[0].message.code is FailCode.NOT_LOCAL


def test_however_long_a_watch_may_be_held_nothing_is_called_for_before_the_tick_before_its_end() -> None:
    session = greeted_server(ServerLimits(hello_s=2.0, keepalive_s=2.0))
    assert session.step(server.Arrived(to_frame(Watch(1, 5, 60_000))), 0.0) == []
    assert session.step(server.Arrived(to_frame(Watch(2, 5, 500))), 0.0) == [After(0.5, server.WatchOver(2))]
    assert not any(after.event == server.WatchOver(1) for after in afters(session.step(server.Tick(), 58.5)))
    assert After(0.75, server.WatchOver(1)) in session.step(server.Tick(), 59.25)
    assert session.step(server.WatchOver(1), 60.0) == [server.Send(News(1, None))]


def test_an_idle_peer_is_dropped_but_not_one_that_waits_for_news() -> None:
    limits = ServerLimits(idle_s=10.0, keepalive_s=100.0)
    idle, waiting = greeted_server(limits), greeted_server(limits)
    waiting.step(server.Arrived(to_frame(Watch(1, 0, 60_000))), 0.0)
    assert not any(isinstance(action, server.Close) for action in idle.step(server.Tick(), 9.9))
    assert any(isinstance(action, server.Close) for action in idle.step(server.Tick(), 10.0))
    assert not any(isinstance(action, server.Close) for action in waiting.step(server.Tick(), 10.0))
