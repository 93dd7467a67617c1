"""Whose prefix is in which engine's cache, as far as what was sent there tells. Pure.

Invariants
- A trajectory has its prefix in one engine's pool at most, and stands in that engine's line if it waits.
- What was computed under one version is not read under another, and nothing is left of a turn that did not come to its
  end, or of an engine that is dead.
"""

from __future__ import annotations

from collections.abc import Iterable

from rose_scheduler.engines import Engine, Engines
from rose_scheduler.events import LeaseAsked
from rose_scheduler.trajectories import Prefix, Trajectories, Trajectory
from rose_scheduler.waiting import COMMON, Home, WaitingLine


class Residency:
    """Keeps the pools of engines, the prefixes of trajectories and the lines in step."""

    def __init__(self, engines: Engines, line: WaitingLine, trajectories: Trajectories) -> None:
        self._engines = engines
        self._line = line
        self._trajectories = trajectories
        self._homeless: list[str] = []

    def homeless(self) -> list[str]:
        """Leases that have waited for an engine which has nothing for them any more, since this was last asked."""
        homeless, self._homeless = self._homeless, []
        return homeless

    def shuts(self, engine: Engine) -> None:
        """An engine takes nothing for now: who waits for it may look elsewhere."""
        self._homeless += self._line.waiting_for(engine)

    def home(self, trajectory: Trajectory | None) -> Engine | None:
        """The engine in whose cache the prefix of a trajectory is, if any, and is not in use."""
        if trajectory is None or trajectory.prefix is None:
            return None
        engine = self._made_by(trajectory.prefix)
        return engine if engine is not None and engine.pool.resident(trajectory.trajectory_id) else None

    def home_of(self, asked: LeaseAsked, trajectory: Trajectory | None) -> Engine | None:
        """That engine, unless it may not take this turn."""
        home = self.home(trajectory)
        return home if home is not None and home.may_take(asked) else None

    def line_of(self, asked: LeaseAsked, trajectory: Trajectory) -> Home:
        """In which line a turn is to wait."""
        home = self.home_of(asked, trajectory)
        return COMMON if home is None else home.life

    def starts(self, asked: LeaseAsked, trajectory: Trajectory, engine: Engine) -> None:
        """A turn is granted to an engine."""
        self._forget(trajectory)
        self._send_away(trajectory)
        trajectory.prefix = Prefix(engine.engine_id, engine.incarnation, engine.weight_version)
        tokens = asked.context_tokens + round(self._trajectories.expected_tokens(asked.group_id))
        self._went(engine.pool.start(asked.lease_id, asked.trajectory_id, tokens))

    def breaks_off(self, asked: LeaseAsked, trajectory: Trajectory, engine: Engine) -> None:
        """A turn is off its engine, which is not trusted to hold anything of it."""
        engine.pool.stop(asked.lease_id)
        prefix = trajectory.prefix
        if prefix is not None and (prefix.engine_id, prefix.incarnation) == engine.life:
            engine.pool.forget(trajectory.trajectory_id)
            self._send_away(trajectory)
            trajectory.prefix = None

    def ends(self, asked: LeaseAsked, trajectory: Trajectory, engine: Engine, tokens: int) -> None:
        """A turn has come to its end there, with so many tokens."""
        prefix = trajectory.prefix
        if trajectory.over or prefix is None or self._made_by(prefix) is not engine:
            engine.pool.stop(asked.lease_id)
            return
        rank = self._trajectories.keep_rank(asked.group_id, asked.evaluation)
        left = asked.context_tokens + tokens
        self._went(engine.pool.leave(asked.lease_id, asked.trajectory_id, left, rank))

    def over(self, trajectory: Trajectory) -> Engine | None:
        """Nobody will ask for its prefix again. Returns the engine that has more room for it."""
        home = self.home(trajectory)
        self._forget(trajectory)
        return home

    def beats(self, engine: Engine, version_before: int, kv_tokens: int) -> None:
        """An engine has said how it is."""
        if engine.weight_version != version_before:
            self.lost(engine)
        self._went(engine.pool.set_capacity(kv_tokens))
        if not engine.slots:
            self.shuts(engine)

    def lost(self, engine: Engine) -> None:
        """Nothing of what it held is of use any more."""
        self._went(engine.pool.forget_all())

    def _made_by(self, prefix: Prefix) -> Engine | None:
        engine = self._engines.live(prefix.engine_id, prefix.incarnation)
        return engine if engine is not None and engine.weight_version == prefix.weight_version else None

    def _forget(self, trajectory: Trajectory) -> None:
        prefix = trajectory.prefix
        engine = None if prefix is None else self._engines.live(prefix.engine_id, prefix.incarnation)
        if engine is not None:
            engine.pool.forget(trajectory.trajectory_id)

    def _went(self, trajectory_ids: Iterable[str]) -> None:
        """These have their prefix nowhere any more."""
        for trajectory_id in trajectory_ids:
            trajectory = self._trajectories.find(trajectory_id)
            if trajectory is not None:
                trajectory.prefix = None
                self._send_away(trajectory)

    def _send_away(self, trajectory: Trajectory) -> None:
        for lease_id in sorted(trajectory.leases):
            if self._line.rehome(lease_id, COMMON):
                self._homeless.append(lease_id)
