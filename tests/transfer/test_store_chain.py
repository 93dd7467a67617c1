"""Routes are the cheapest there are, and what is dropped or merged makes none of them dearer, nor any version lost."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_transfer.store.chain import (
    Hop,
    Link,
    Route,
    anchor_due,
    cheapest,
    find_route,
    kept_versions,
    mergeable,
    needed,
    route_bytes,
    runs,
)

DENSE_BYTES = 1000


def dense(version: int, size: int = DENSE_BYTES) -> Link:
    return Link(version, None, size, "overwrite")


def steps(base: int, version: int, size: int = 10) -> Link:
    return Link(version, base, size, "steps")


def line(first: int, last: int, size: int = 10) -> list[Link]:
    """Version `first` whole, then steps from each to the next."""
    return [dense(first), *(steps(version, version + 1, size) for version in range(first, last))]


@st.composite
def histories(draw: st.DrawFn) -> list[Link]:
    """Versions 0 to n, each from some version before it, or whole, or both; some lead back, some do not."""
    links = [dense(0)]
    for version in range(1, draw(st.integers(1, 9))):
        size = draw(st.integers(1, 400))
        way = draw(st.sampled_from(["steps", "steps", "steps", "overwrite", "dense", "both"]))
        base = draw(st.integers(max(0, version - 3), version - 1))
        if way in ("dense", "both"):
            links.append(dense(version))
        if way in ("steps", "both"):
            links.append(steps(base, version, size))
        if way == "overwrite":
            links.append(Link(version, base, size, "overwrite"))
    return links


def check_whole(route: Route, start: int | None, goal: int) -> None:
    places = [start, *(hop.goal for hop in route)]
    assert places[-1] == goal
    assert [hop.start for hop in route] == places[:-1]
    assert all(hop.link.mode == "steps" for hop in route if hop.backwards)


def by_brute_force(links: list[Link], start: int | None, goal: int) -> int | None:
    """Fewest bytes by relaxing every edge as often as there are versions."""
    cost: dict[int | None, int] = {start: 0}
    for _ in range(len(links) + 1):
        for link in links:
            edges = [(link.base, link.version)]
            if link.base is not None and link.mode == "steps":
                edges.append((link.version, link.base))
            for begin, end in edges:
                if begin in cost:
                    cost[end] = min(cost.get(end, 10**9), cost[begin] + link.encoded_bytes)
    return cost.get(goal)


@settings(max_examples=150, deadline=None)
@given(histories())
def test_every_pair_has_the_cheapest_whole_route(links: list[Link]) -> None:
    versions = sorted({link.version for link in links})
    for goal in versions:
        for start in (None, *versions):
            route = find_route(links, start, goal)
            wanted = by_brute_force(links, start, goal)
            assert (None if route is None else route_bytes(route)) == wanted
            if route is not None:
                check_whole(route, start, goal)
            anew = find_route(links, None, goal)
            best = cheapest(links, start, goal)
            assert anew is not None
            assert best is not None
            assert route_bytes(best) == min(route_bytes(one) for one in (route, anew) if one is not None)


@settings(max_examples=150, deadline=None)
@given(histories(), st.integers(1, 4), st.sets(st.integers(0, 9), max_size=2))
def test_what_is_dropped_makes_nothing_dearer(links: list[Link], keep: int, pinned: set[int]) -> None:
    kept = kept_versions({link.version for link in links}, keep, pinned)
    left = list(needed(links, kept))
    for goal in kept:
        for start in (None, *kept):
            before, after = find_route(links, start, goal), find_route(left, start, goal)
            assert (before is None) == (after is None)
            if before is not None and after is not None:
                assert route_bytes(before) == route_bytes(after)


@settings(max_examples=150, deadline=None)
@given(histories(), st.integers(1, 4), st.sets(st.integers(0, 9), max_size=2))
def test_merging_bypasses_retired_versions_and_loses_nothing(links: list[Link], keep: int, pinned: set[int]) -> None:
    kept = kept_versions({link.version for link in links}, keep, pinned)
    merged: list[Link] = []
    for route in mergeable(links, kept):
        check_whole(route, route[0].start, route[-1].goal)
        assert len(route) > 1
        assert len({hop.link.mode for hop in route}) == 1
        assert not {hop.goal for hop in route[:-1]} & set(kept)
        merged.append(Link(route[-1].goal, route[0].start, route_bytes(route) - 1, route[0].link.mode))
    left = list(needed([*links, *merged], kept))
    assert mergeable(left, kept) == ()
    for goal in kept:
        for start in (None, *kept):
            before, after = find_route(links, start, goal), find_route(left, start, goal)
            if before is not None:
                assert after is not None
                assert route_bytes(after) <= route_bytes(before)


def test_back_along_steps_but_not_along_an_overwrite() -> None:
    links = [*line(1, 3), Link(4, 3, 10, "overwrite")]
    assert find_route(links, 3, 1) == (Hop(steps(2, 3), True), Hop(steps(1, 2), True))
    assert find_route(links, 4, 1) is None
    assert cheapest(links, 4, 1) == (Hop(dense(1)),)
    assert find_route(links, 2, 2) == ()


def test_a_missing_link_leads_over_a_dense_one_or_nowhere() -> None:
    links = [link for link in line(1, 5) if link != steps(3, 4)]
    assert cheapest(links, 2, 5) is None
    assert cheapest([*links, dense(4)], 2, 5) == (Hop(dense(4)), Hop(steps(4, 5)))


def test_many_deltas_give_way_to_a_dense_version() -> None:
    links = [*line(1, 6, 300), dense(6)]
    assert cheapest(links, 4, 6) == (Hop(steps(4, 5, 300)), Hop(steps(5, 6, 300)))
    assert cheapest(links, 1, 6) == (Hop(dense(6)),)


def test_runs_end_where_direction_or_kind_change() -> None:
    route = (Hop(dense(1)), Hop(steps(1, 2)), Hop(steps(2, 3)), Hop(steps(9, 3), True), Hop(Link(8, 9, 5, "overwrite")))
    assert [len(part) for part in runs(route)] == [1, 2, 1, 1]
    assert list(runs(())) == []


def test_the_last_ones_and_pinned_ones_are_kept() -> None:
    assert kept_versions([5, 1, 4, 2, 3], 2, {1, 99}) == (1, 4, 5)


@pytest.mark.parametrize(("size", "due"), [(100, False), (101, True)])
def test_an_anchor_is_due_when_deltas_are_more_than_half_of_it(size: int, due: bool) -> None:
    assert anchor_due(line(1, 6, size), 6) is due


def test_a_version_that_cannot_be_had_from_nothing_needs_an_anchor() -> None:
    assert anchor_due([steps(1, 2)], 2)


def test_deltas_through_retired_versions_become_one() -> None:
    links = line(1, 8)
    assert mergeable(links, [7, 8]) == (tuple(Hop(a) for a in links[1:7]),)
    assert mergeable(links, [3, 7, 8]) == (tuple(Hop(a) for a in links[1:3]), tuple(Hop(a) for a in links[3:7]))
    assert mergeable(links, range(1, 9)) == ()


def test_a_fork_stays_where_two_kept_versions_part() -> None:
    links = [*line(1, 4), steps(2, 5), steps(5, 6)]
    assert [[hop.goal for hop in route] for route in mergeable(links, [4, 6])] == [[3, 4], [5, 6]]
    assert find_route(links, 4, 6) is not None
    check_whole(find_route(links, 4, 6) or (), 4, 6)


def test_many_kept_versions_cost_one_search_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40, each of which can go to each other one: no more hops are looked at than there are, for each start."""
    looked_at = 0
    push = heapq.heappush

    def counted(heap: list[Any], entry: Any) -> None:
        nonlocal looked_at
        looked_at += 1
        push(heap, entry)

    links = line(1, 40)
    monkeypatch.setattr(heapq, "heappush", counted)
    assert needed(links, range(1, 41)) == set(links)
    assert looked_at <= 41 * 2 * len(links)


def test_routes_are_the_same_every_time() -> None:
    """Two ways of the same bytes and hops: the one named first."""
    links = [dense(1), steps(1, 2), steps(1, 3), steps(2, 4), steps(3, 4)]
    assert len({find_route(links, 1, 4) for _ in range(5)}) == 1
    assert all(one.goal == other.start for one, other in pairwise(find_route(links, 1, 4) or ()))
