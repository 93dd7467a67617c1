"""Client and server sessions against each other in virtual time, over links that do what links do."""

from __future__ import annotations

from random import Random

import pytest
from link_world import FAULTS_UNTIL_S, PIECE, QUIET_S, TOKEN, LinkWorld, Trouble

from rose.driver.faults import FaultPlan
from rose_transfer.transport import client_events as client
from rose_transfer.transport.client_state import ClientLimits
from rose_transfer.transport.interface import Announcement, Refused

SEEDS = 240
OBJECTS = {
    "empty": b"",
    "short": b"one piece",
    "even": Random(1).randbytes(4 * PIECE),
    "long": Random(2).randbytes(40 * PIECE + 17),
}
ONE_STREAM = ClientLimits(streams=1, window=2, piece_bytes=PIECE, greet_s=0.5, stall_s=1.0, retry_s=0.05)


def fetch_world(**settings: object) -> LinkWorld:
    world = LinkWorld(0, OBJECTS, **settings)
    world.driver.call(0.0, "", lambda: world.fetch(1, "long"))
    return world


@pytest.mark.parametrize("block", range(8))
def test_whatever_links_do_every_ask_ends_well_once_they_are_calm(block: int) -> None:
    for seed in range(block * SEEDS // 8, (block + 1) * SEEDS // 8):
        random = Random(f"setup {seed}")
        trouble = Trouble(
            corrupt=random.choice((0.0, 0.02, 0.1)),
            truncate=random.choice((0.0, 0.02)),
            cut=random.choice((0.0, 0.02, 0.1)),
            mute=random.choice((0.0, 0.2)),
        )
        faults = FaultPlan.drawn(random, FAULTS_UNTIL_S)
        world = LinkWorld(seed, OBJECTS, faults=faults, trouble=trouble)
        play(world, random, faults)
        world.driver.run(QUIET_S)
        try:
            world.check_quiet(set(range(1, 9)) | {100, 101})
        except Exception as error:
            raise world.driver.failed(str(error)) from error
        assert world.ended[100] == client.Told(100, Announcement(2, "manifest-2"))
        assert world.ended[101] == client.Told(101, None)


def play(world: LinkWorld, random: Random, faults: FaultPlan) -> None:
    keys = [random.choice([*OBJECTS, "missing"]) for _ in range(8)]
    for ask, key in enumerate(keys, start=1):
        known = random.random() < 0.5 and key in OBJECTS
        resume = min(len(OBJECTS.get(key, b"")), random.choice((0, 0, 5, PIECE)))
        at_s = random.random() * FAULTS_UNTIL_S

        def ask_for(ask: int = ask, key: str = key, resume: int = resume, known: bool = known) -> None:
            world.fetch(ask, key, resume_from=resume, size_known=known)

        world.driver.call(at_s, f"fetch {ask} of {key}", ask_for)
    world.driver.call(
        FAULTS_UNTIL_S * random.random(), "cancel 8", lambda: world.cancel(8) if 8 in world.keys else None
    )
    world.driver.call(1.0, "watches", lambda: world.driver.feed(client.WatchAsked(100, 2, 30.0)))
    world.driver.call(1.0, "", lambda: world.driver.feed(client.WatchAsked(101, 9, 12.0)))
    world.driver.call(2.0, "version 1", lambda: world.announce(1))
    world.driver.call(4.0, "version 2", lambda: world.announce(2))
    for at_s, down_s in faults.crashes(random):
        world.driver.call(at_s, "server dies", lambda down_s=down_s: world.crash(down_s))


def test_equal_seeds_give_equal_runs() -> None:
    prints = []
    for _ in range(2):
        random = Random("again")
        faults = FaultPlan.drawn(random, FAULTS_UNTIL_S)
        world = LinkWorld(3, OBJECTS, faults=faults, trouble=Trouble(cut=0.05))
        play(world, random, faults)
        world.driver.run(QUIET_S)
        prints.append(world.driver.fingerprint())
    assert prints[0] == prints[1]


@pytest.mark.parametrize("kill", [False, True], ids=["connection", "server"])
def test_a_cut_at_every_frame_boundary_costs_no_more_than_what_was_under_way(kill: bool) -> None:
    whole = fetch_world()
    whole.driver.run(QUIET_S)
    size = len(OBJECTS["long"])
    assert whole.served_bytes == size, "without faults nothing is sent twice"
    for frame in range(whole.frames):
        world = fetch_world(cut_frame=frame, kill=kill)
        world.driver.run(QUIET_S)
        world.check_quiet({1})
        under_way = world.limits.streams * world.limits.window * PIECE
        assert world.served_bytes <= size + (under_way if kill else world.limits.window * PIECE), frame


def test_pieces_are_striped_over_all_streams() -> None:
    world = fetch_world()
    world.driver.run(QUIET_S)
    by_line = {number: sum(f"{number} ← Data" in line for line in world.driver.trace()) for number in world.lines}
    assert len(by_line) == 3
    assert min(by_line.values()) >= 8


def test_a_resumed_fetch_asks_only_for_the_rest() -> None:
    world = LinkWorld(0, OBJECTS)
    world.driver.call(0.0, "", lambda: world.fetch(1, "long", resume_from=1000))
    world.driver.run(QUIET_S)
    world.check_quiet({1})
    assert world.served_bytes == len(OBJECTS["long"]) - 1000


def test_a_silent_server_is_left_and_another_link_tried() -> None:
    world = fetch_world(trouble=Trouble(mute=1.0))
    world.driver.run(QUIET_S)
    world.check_quiet({1})
    assert world.drops.count("silence") >= 3


def test_a_wrong_token_is_refused_at_once_and_nothing_is_served() -> None:
    world = fetch_world(server_token=b"another token altogether")
    world.driver.run(QUIET_S)
    end = world.ended[1]
    assert isinstance(end, client.Failed)
    assert isinstance(end.error, Refused)
    assert world.served_bytes == 0
    assert TOKEN.decode() not in str(end.error)


def test_an_object_that_changes_its_size_is_not_taken() -> None:
    objects = {"long": OBJECTS["long"]}
    world = LinkWorld(0, objects, limits=ONE_STREAM)
    world.driver.call(0.0, "", lambda: world.fetch(1, "long"))
    world.driver.call(0.15, "another size", lambda: objects.update(long=OBJECTS["long"] + b"more"))
    world.driver.run(5.0)
    end = world.ended[1]
    assert isinstance(end, client.Failed)
    assert "not 2577" in str(end.error)


def test_a_long_wait_for_news_is_no_silence() -> None:
    world = LinkWorld(0, OBJECTS)
    world.driver.call(0.0, "", lambda: world.driver.feed(client.WatchAsked(1, 0, 30.0)))
    world.driver.call(20.0, "version 0", lambda: world.announce(0))
    world.driver.run(QUIET_S)
    assert world.ended[1] == client.Told(1, Announcement(0, "manifest-0"))
    assert world.drops == []
    assert len(world.lines) == 1, "a watch needs one connection"
