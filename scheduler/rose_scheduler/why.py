"""Why a trajectory is not further: what it waits for, since when, and what happened to it before. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rose_scheduler.engines import Engine, Engines
from rose_scheduler.events import Health, LeaseAsked
from rose_scheduler.leases import Lease
from rose_scheduler.trajectories import Happened, Trajectory
from rose_scheduler.waiting import WaitingLine


class Stand(StrEnum):
    """WAITING for an engine, RUNNING on one, or BETWEEN turns, with its environment."""

    WAITING = "waiting"
    RUNNING = "running"
    BETWEEN = "between turns"


@dataclass(frozen=True, slots=True)
class Why:
    """`waits_for` in words, for `for_s` seconds so far; it is given up in `left_s` seconds, if that is known.

    `history` holds the last things that happened, oldest first; their times are on the core's clock, as is `now_s`.
    """

    trajectory_id: str
    group_id: str
    stand: Stand
    lease_id: str
    waits_for: str
    for_s: float
    left_s: float | None
    now_s: float
    history: tuple[Happened, ...]


def explain(trajectory: Trajectory, lease: Lease | None, engines: Engines, line: WaitingLine, now: float) -> Why:
    """Say where a trajectory is; `lease` is its open one."""
    stand, lease_id, left_s = Stand.BETWEEN, "", None
    waits_for, since_s = "its next turn: no lease is asked for", _last_s(trajectory, now)
    if lease is not None and lease.grant is not None:
        stand, since_s, left_s = Stand.RUNNING, lease.granted_s, lease.grant.until_s - now
        waits_for = f"the end of turn {lease.asked.turn} on {lease.grant.engine_id}"
    elif lease is not None:
        stand, since_s, left_s = Stand.WAITING, lease.asked_s, lease.asked.deadline_s - now
        waits_for = missing(engines, lease.asked)
        if lease.asked.lease_id in line:
            waits_for += f"; {line.ahead(lease.asked.lease_id)} ahead of it in line"
            home = line.home(lease.asked.lease_id)
            if home is not None:
                waits_for += f"; its prefix is on {home[0]}, which is expected to be quicker than to compute it anew"
    if lease is not None:
        lease_id = lease.asked.lease_id
    return Why(
        trajectory.trajectory_id,
        trajectory.group.group_id,
        stand,
        lease_id,
        waits_for,
        now - since_s,
        left_s,
        now,
        tuple(trajectory.history),
    )


def missing(engines: Engines, asked: LeaseAsked) -> str:
    """What stands between a lease and every engine, in words: `an engine: 3 of version 7 or newer are full`."""
    if not len(engines):
        return "an engine: none is offered"
    counts: dict[str, int] = {}
    for engine in engines:
        obstacle = _obstacle(engine, asked)
        counts[obstacle] = counts.get(obstacle, 0) + 1
    said = ", ".join(f"{number} {obstacle}" for obstacle, number in sorted(counts.items()))
    return f"an engine of version {asked.min_version} or newer with room: {said}"


def _obstacle(engine: Engine, asked: LeaseAsked) -> str:
    if engine.health is not Health.HEALTHY:
        return str(engine.health)
    if engine.weight_version < asked.min_version:
        return f"at version {engine.weight_version}"
    if engine.incarnation in asked.avoid:
        return "that this turn was lost on"
    if not engine.slots:
        return "closed"
    if len(engine.leases) >= engine.slots:
        return "full"
    if not engine.pool.fits(asked.context_tokens):
        return "whose memory is in use"
    return "where a start now would cost those that run more than it is worth"


def _last_s(trajectory: Trajectory, now: float) -> float:
    return trajectory.history[-1].at_s if trajectory.history else now
