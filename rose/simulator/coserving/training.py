"""Groups of trajectories, what becomes of their tokens, and the versions that come of it.

Invariants, checked by the run's own books
- What is trained is what engines sampled, token for token and version for version, resumed pieces included.
- An alarm is raised for a malformed version, once, as soon as enough of its actions were seen and not before.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from rose.ledger import Account
from rose.records import Outcome, Purpose, Trajectory
from rose.simulator.coserving.chain import must_be_as_sampled
from rose.simulator.coserving.fleet import VERSIONS, Store
from rose.simulator.coserving.parts import PartsDriver, To
from rose.simulator.coserving.player import Player, Surroundings
from rose.simulator.coserving.token_books import TokenBooks
from rose.simulator.world import must
from rose.trainer.alarm import AlarmSettings, MalformedAlarm
from rose.version_events import Published

LAG_MAX = 1
"""By how many versions an engine may be behind the newest to be given a turn."""
STALE_MAX = 1
"""By how many versions a trajectory's oldest token may be behind to be trained."""
UPDATE_S = 0.1
ALARM = AlarmSettings(limit=0.5, min_actions=3)

_FAILED = {
    Outcome.TRUNCATED: Account.TRUNCATED,
    Outcome.ENVIRONMENT_FAILED: Account.ENVIRONMENT_FAILED,
    Outcome.ABORTED: Account.ABORTED,
}


class Training:
    """Trains group by group; `malformed` is the chance that a new version acts malformed."""

    def __init__(
        self, driver: PartsDriver, store: Store, books: TokenBooks, alarm: MalformedAlarm, malformed: float
    ) -> None:
        self.players: list[Player] = []
        self.alarms = self.uncounted = 0
        self.outcomes: Counter[Outcome] = Counter()
        self._driver = driver
        self._store = store
        self._books = books
        self._alarm = alarm
        self._malformed = malformed
        self._bad: set[int] = set()
        self._actions: Counter[int] = Counter()
        self._left: dict[str, int] = {}
        self._trained: list[Trajectory] = []

    def publish(self) -> None:
        """A new version is in the store."""
        version = self._store.publish()
        if version and self._driver.random.random() < self._malformed:
            self._bad.add(version)
        self._driver.feed(To(VERSIONS, Published(version, f"hash of {version}")))

    def min_version(self) -> int:
        return max(0, self._store.newest - LAG_MAX)

    def begin_group(self, group_id: str, size: int, purpose: Purpose, around: Surroundings) -> None:
        """Its trajectories begin now."""
        self._left[group_id] = size
        group: list[Player] = []
        for number in range(size):
            turns = self._driver.random.randint(1, 3)
            ended = partial(self._ended, group)
            group.append(Player(f"{group_id}.t{number}", group_id, purpose, turns, around, ended))
        self.players.extend(group)
        for player in group:
            player.begin()

    def acted(self, version: int) -> None:
        """An action was read, of a turn that ended under a version."""
        bad = version in self._bad
        self._actions[version] += 1
        alarm = self._alarm.step(version, 1, int(bad))
        good = any(
            seen >= ALARM.min_actions and earlier < version and earlier not in self._bad
            for earlier, seen in self._actions.items()
        )
        due = bad and good and self._actions[version] == ALARM.min_actions
        must((alarm is not None) == due, "an alarm is, should be", (alarm, due))
        self.alarms += alarm is not None

    @property
    def over(self) -> bool:
        return not self._left

    def _ended(self, group: list[Player], player: Player) -> None:
        assert player.outcome is not None
        self.outcomes[player.outcome] += 1
        account = _FAILED.get(player.outcome)
        must((account is None) == (player.failure == ""), "an outcome without a cause", player.outcome)
        if player.purpose is Purpose.EVALUATION:
            account = Account.EVALUATION
        if account is not None:
            self._settle(player, account)
        self._left[player.group_id] -= 1
        if not self._left[player.group_id]:
            self._driver.call(UPDATE_S, f"{player.group_id} is complete", partial(self._update, group))

    def _update(self, group: list[Player]) -> None:
        del self._left[group[0].group_id]
        done = [player for player in group if player.outcome is Outcome.COMPLETED]
        if group[0].purpose is Purpose.EVALUATION:
            for player in done:
                must_be_as_sampled(player.trajectory())
            return
        trajectories = [(player, player.trajectory()) for player in done]
        flat = len({trajectory.reward for _, trajectory in trajectories}) < 2
        for player, trajectory in trajectories:
            must_be_as_sampled(trajectory)
            received = self._books.in_flight(player.trajectory_id)
            must(received == trajectory.output_tokens, "tokens were received that are in no turn", received)
            oldest = trajectory.oldest_version
            assert oldest is not None
            stale = oldest < self._store.newest - STALE_MAX
            account = Account.STALE if stale else Account.ZERO_VARIANCE if flat else Account.TRAINED
            self._settle(player, account)
        if trajectories:
            self.publish()

    def _settle(self, player: Player, account: Account) -> None:
        """A trajectory whose request nobody can count yet is settled when the run closes."""
        if any(trajectory_id == player.trajectory_id for trajectory_id, _ in self._books.open_requests.values()):
            self.uncounted += 1
        else:
            self._books.settle(player.trajectory_id, account)
