"""The KV memory of one engine, as the scheduler believes it to be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose_scheduler.pool import DrivenOut, Pool

_NAMES = "abcdef"
_STEP = st.tuples(
    st.sampled_from(("start", "leave", "stop", "forget", "capacity", "forget_all")),
    st.sampled_from(_NAMES),
    st.integers(0, 60),
    st.integers(0, 3),
)


def a_pool(capacity: int, *residents: tuple[str, int, int]) -> Pool:
    pool = Pool()
    pool.set_capacity(capacity)
    for name, tokens, rank in residents:
        pool.start(name, name, tokens)
        pool.leave(name, name, tokens, rank)
    return pool


def test_those_of_the_highest_rank_go_first_each_from_its_end_on() -> None:
    pool = a_pool(100, ("old", 40, 1), ("new", 50, 2))
    assert pool.start("x", "x", 30) == ()
    assert (pool.resident("old"), pool.resident("new")) == (40, 30)
    assert pool.start("y", "y", 35) == ("new",)
    assert (pool.resident("old"), pool.resident("new")) == (35, 0)
    assert pool.set_capacity(65) == ("old",)


def test_what_a_start_would_drive_out_is_told_by_whom_it_is_kept_longer_for() -> None:
    pool = a_pool(100, ("old", 40, 1), ("new", 50, 3))
    assert pool.driven_out(10, 2) == DrivenOut(0, 0)
    assert pool.driven_out(30, 2) == DrivenOut(0, 20)
    assert pool.driven_out(80, 2) == DrivenOut(20, 50)
    assert pool.driven_out(500, 0) == DrivenOut(0, 90)


def test_a_prefix_in_use_is_not_resident_and_one_that_is_left_again_is_as_long_as_it_is_now() -> None:
    pool = a_pool(0, ("a", 40, 1))
    pool.start("lease", "a", 70)
    assert (pool.resident("a"), pool.running, pool.running_tokens) == (0, 1, 70)
    pool.leave("lease", "a", 55, 1)
    assert (pool.resident("a"), pool.running, pool.running_tokens) == (55, 0, 0)


def test_alone_any_turn_fits_and_beside_others_only_what_there_is_room_for() -> None:
    pool = a_pool(100)
    assert pool.fits(1000)
    pool.start("a", "a", 60)
    assert pool.fits(40)
    assert not pool.fits(41)
    assert a_pool(0).fits(10**9)


@given(st.lists(_STEP, max_size=60))
def test_it_never_holds_more_than_there_is_and_tells_of_all_that_goes(steps: list[tuple[str, str, int, int]]) -> None:
    pool, resident, running = Pool(), dict[str, int](), dict[str, int]()
    for what, name, tokens, rank in steps:
        gone: tuple[str, ...] = ()
        match what:
            case "start" if name not in running:
                gone = pool.start(name, name, tokens)
                resident.pop(name, None)
                running[name] = tokens
            case "leave" if name in running:
                gone = pool.leave(name, name, tokens, rank)
                del running[name]
                if tokens:
                    resident[name] = tokens
            case "stop":
                pool.stop(name)
                running.pop(name, None)
            case "forget":
                pool.forget(name)
                resident.pop(name, None)
            case "capacity":
                gone = pool.set_capacity(tokens)
            case "forget_all":
                gone = pool.forget_all()
        for one in gone:
            del resident[one]
        assert {name: pool.resident(name) for name in _NAMES if pool.resident(name)}.keys() == resident.keys()
        assert all(pool.resident(name) <= tokens for name, tokens in resident.items())
        assert pool.resident_tokens == sum(pool.resident(name) for name in _NAMES)
        assert (pool.running, pool.running_tokens) == (len(running), sum(running.values()))
        within = pool.running_tokens + pool.resident_tokens <= pool.capacity_tokens
        assert within or not pool.capacity_tokens or not pool.residents
