"""Which deltas lead from any version to any other, and which of them are worth their room. A pure core.

Versions are joined by links. A link without a base holds its version whole; one of steps leads both ways; one that
overwrites what changed leads from its base only. Whoever holds a version may go on from it or start anew.

Invariants
- A route is whole: each hop begins where the one before it ended, the first at what is held, the last at what is
  wanted. Where a link is missing, the route goes another way, over a dense link if need be, or there is none.
- Among routes the one with the fewest bytes is taken, then the one with the fewest hops.
- What `needed` names has, for the versions kept, the same cheapest routes as all links together.

Compaction, in this order
- A version is written whole anew (`anchor_due`) once who joins would fetch more than half of it again in deltas.
- A retired version that is only passed through is bypassed: the deltas around it are merged into one (`mergeable`).
  Merging 8 steps of training takes about two thirds of their bytes, and one application instead of 8.
- What no cheapest route needs is dropped.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rose_transfer.codec.streams import Mode

ANCHOR_EXCESS = 0.5
"""By which share of a dense version the deltas behind it may grow, before the newest one is written whole."""
Start = int | None


@dataclass(frozen=True, slots=True)
class Link:
    """The objects that lead to `version` from `base`, or from nothing if that is None."""

    version: int
    base: int | None
    encoded_bytes: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Hop:
    """A link, gone the way it was made or back."""

    link: Link
    backwards: bool = False

    @property
    def start(self) -> Start:
        return self.link.version if self.backwards else self.link.base

    @property
    def goal(self) -> int:
        if not self.backwards:
            return self.link.version
        assert self.link.base is not None
        return self.link.base


Route = tuple[Hop, ...]


def route_bytes(route: Route) -> int:
    return sum(hop.link.encoded_bytes for hop in route)


def find_route(links: Iterable[Link], start: Start, goal: int) -> Route | None:
    """The cheapest way to `goal` by deltas from version `start`, or, if that is None, from nothing.

    None if there is none. A version leads to itself by no hop at all.
    """
    return _route(_last_hops(_hops_from(links), start), start, goal)


def cheapest(links: Collection[Link], start: Start, goal: int) -> Route | None:
    """As `find_route`, but who holds `start` begins with nothing where that takes fewer bytes."""
    onwards = None if start is None else find_route(links, start, goal)
    anew = find_route(links, None, goal)
    if onwards is None or anew is None:
        return onwards if anew is None else anew
    return min(onwards, anew, key=route_bytes)


def runs(route: Route) -> Iterator[Route]:
    """The route in parts whose deltas can be merged: of one direction and one mode, nothing dense."""
    part: list[Hop] = []
    for hop in route:
        if part and not _merges(part[-1], hop):
            yield tuple(part)
            part = []
        part.append(hop)
    if part:
        yield tuple(part)


def kept_versions(versions: Iterable[int], keep: int, pinned: Collection[int]) -> tuple[int, ...]:
    """The last `keep` and those that are pinned, oldest first."""
    ordered = sorted(versions)
    return tuple(version for version in ordered if version in pinned or version in ordered[-keep:])


def needed(links: Collection[Link], kept: Iterable[int]) -> set[Link]:
    """The links of the cheapest routes to each kept version from nothing and from each other one."""
    kept = tuple(kept)
    hops = _hops_from(links)
    found: set[Link] = set()
    for start in (None, *kept):
        last = _last_hops(hops, start)
        traced: set[Start] = {start}
        for goal in kept:
            at: Start = goal
            while at not in traced and at in last:
                traced.add(at)
                found.add(last[at].link)
                at = last[at].start
    return found


def mergeable(links: Collection[Link], kept: Collection[int]) -> tuple[Route, ...]:
    """Routes of two links or more, each to become one: all they pass through is retired and leads nowhere else."""
    used = needed(links, kept)
    into: dict[int, list[Link]] = {}
    out_of: dict[int, list[Link]] = {}
    for link in used:
        into.setdefault(link.version, []).append(link)
        if link.base is not None:
            out_of.setdefault(link.base, []).append(link)
    passed = {
        version
        for version in into.keys() & out_of.keys()
        if version not in kept
        and len(into[version]) == len(out_of[version]) == 1
        and _merges(Hop(into[version][0]), Hop(out_of[version][0]))
    }
    found: list[Route] = []
    for link in sorted(used, key=lambda link: link.version):
        if link.base in passed or link.version not in passed:
            continue
        route = [Hop(link)]
        while route[-1].goal in passed:
            route.append(Hop(out_of[route[-1].goal][0]))
        found.append(tuple(route))
    return tuple(found)


def anchor_due(links: Collection[Link], newest: int) -> bool:
    """Whether `newest` should be written whole: deltas have grown too much, or it cannot be had from nothing at all."""
    route = find_route(links, None, newest)
    if route is None:
        return True
    dense = route[0].link.encoded_bytes
    return route_bytes(route) - dense > ANCHOR_EXCESS * dense


def _hops_from(links: Iterable[Link]) -> Mapping[Start, list[Hop]]:
    hops: dict[Start, list[Hop]] = {}
    for link in links:
        for hop in _both_ways(link):
            hops.setdefault(hop.start, []).append(hop)
    return hops


def _last_hops(hops: Mapping[Start, list[Hop]], start: Start) -> Mapping[Start, Hop]:
    """The last hop of the cheapest route from `start` to each version that can be reached (Dijkstra's algorithm)."""
    last: dict[Start, Hop] = {}
    reached = {start}
    waiting: list[tuple[int, int, int, Hop]] = []
    numbers = itertools.count()

    def leave(at: Start, size: int, length: int) -> None:
        for hop in hops.get(at, ()):
            heapq.heappush(waiting, (size + hop.link.encoded_bytes, length + 1, next(numbers), hop))

    leave(start, 0, 0)
    while waiting:
        size, length, _, hop = heapq.heappop(waiting)
        if hop.goal not in reached:
            reached.add(hop.goal)
            last[hop.goal] = hop
            leave(hop.goal, size, length)
    return last


def _route(last: Mapping[Start, Hop], start: Start, goal: int) -> Route | None:
    hops: list[Hop] = []
    at: Start = goal
    while at != start:
        if at not in last:
            return None
        hops.append(last[at])
        at = last[at].start
    return tuple(reversed(hops))


def _both_ways(link: Link) -> Iterator[Hop]:
    yield Hop(link)
    if link.base is not None and link.mode == "steps":
        yield Hop(link, backwards=True)


def _merges(first: Hop, second: Hop) -> bool:
    one, other = first.link, second.link
    return None not in (one.base, other.base) and (one.mode, first.backwards) == (other.mode, second.backwards)
