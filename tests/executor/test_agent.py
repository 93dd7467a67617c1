"""The executor without a real guest: what it makes of guests that die at once, and what it says of itself."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from rose.errors import ClusterError, EngineError
from rose.metrics import ExecutorMetrics
from rose.runs import Run
from rose.slo import Slo
from rose.status import StatusBoard
from rose.waits import WaitBoard
from rose_executor import supervisor
from rose_executor.agent import SHOW_EVERY_S, UNSEEN_S, Agent
from rose_executor.agent_figures import AgentFigures
from rose_executor.board import QUOTA, SERVING, BoardReader, HalfWriter
from rose_executor.board_states import GuestState, Reading, ServingState
from rose_executor.engine_health import EngineHealth
from rose_executor.engine_launcher import Midwife
from rose_executor.engine_settings import EngineSettings
from rose_executor.guest_keeper import GuestKeeper, Joined
from rose_executor.guest_presence import GuestPresence, PresenceRules, Residue, Room, Up
from rose_executor.guest_rules import LOOK_S, GuestRules, Looked
from rose_executor.guest_watch import GuestWatch
from rose_executor.kv_budget import FixedBlocks, KvBudget
from rose_executor.kv_policy import KvPolicy, KvPool
from rose_executor.launcher import Child, Command, Launcher, SpawnedChild
from rose_executor.lender import GuestNow, GuestOffer
from rose_executor.page_shelf import PageShelf
from rose_executor.partition_terms import Partition, Role
from rose_executor.slack import SlackPolicy
from rose_executor.step_shape import StepShape
from rose_executor.tiers import FIXED_SPLIT, TierNow, tier_now

SLO = Slo(ttft_s=0.4, tpot_s=0.05)
LONG_S = 60.0


class Floor:
    """A partitioner that notes who was placed, and refuses if it is told to."""

    def __init__(self) -> None:
        self.placed: list[int] = []
        self.refuses = False
        self.thawed = 0
        self.renewed = 0
        self.stuck = ""

    def place(self, pid: int, role: Role) -> None:
        assert role is Role.GUEST
        if self.refuses:
            raise ClusterError("the kernel refuses")
        self.placed.append(pid)

    def freeze(self) -> None:
        raise AssertionError("nobody is frozen here")

    def thaw(self) -> None:
        self.thawed += 1
        if self.stuck:
            raise ClusterError(self.stuck)

    def describe(self) -> Partition:
        return Partition("floor", "", "", 1.0, holds=True)

    def close(self) -> None:
        pass

    def set_share(self, share: float | None) -> None:
        raise AssertionError("no share is changed here")

    def guest_env(self) -> dict[str, str | None]:
        return {}

    def release(self, pid: int) -> None:
        pass

    def renew_watchdog(self) -> bool:
        self.renewed += 1
        return False


class Spawner:
    """Starts a program in place of an engine."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.children: list[SpawnedChild] = []

    async def launch(self, command: Command) -> Child:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", self._program, start_new_session=True)
        self.children.append(SpawnedChild(process))
        return self.children[-1]


class NoScheduler:
    def __init__(self, trouble: str | None = "away") -> None:
        self.trouble = trouble

    async def keep_offered(self, guest: GuestOffer, now: Callable[[], GuestNow]) -> NoReturn:
        raise AssertionError("nothing is offered here")

    async def withdraw(self, guest: GuestOffer, why: str) -> None:
        raise AssertionError("nothing was offered here")


def no_receiver(control: object) -> AbstractAsyncContextManager[Any]:
    raise AssertionError("no engine answers here")


class Scene:
    """An agent over a board, on which nobody serves."""

    def __init__(self, folder: Path, model: Path, spawner: Spawner, restarts_max: int = 1) -> None:
        self.floor, self.metrics, self.waits = Floor(), ExecutorMetrics(), WaitBoard()
        self.spawner = spawner
        self.unkept = ""
        self.shelf = PageShelf(folder / "pages", self.waits)
        rules = GuestRules(SlackPolicy(SLO, 256, 16), FixedBlocks(2**31))
        self.watch = GuestWatch(folder / "board", rules, self.floor)
        self.status = StatusBoard(Run("executor", folder, folder, os.open(os.devnull, os.O_RDONLY)), self.waits)
        figures = AgentFigures(self.metrics, self.status, self.waits, SLO, self._tier, lambda: self.unkept)
        guest = GuestKeeper(
            EngineSettings("lent", model, folder, folder / "guest.log", board=folder / "board", page_dir=folder),
            EngineHealth(restarts_max, backoff_s=0.01),
            self.watch,
            self.floor,
            self.shelf,
            figures,
            self.waits,
            self._launcher,
        )
        self.agent = Agent(guest, self.watch, self.shelf, figures)

    def _tier(self, serving: ServingState | None) -> TierNow:
        return tier_now(serving, self.floor.describe(), FIXED_SPLIT)

    @asynccontextmanager
    async def _launcher(self, born: Callable[[int], None]) -> AsyncIterator[Launcher]:
        yield Midwife(self.spawner, born)

    async def run(self) -> None:
        try:
            await asyncio.wait_for(self.agent.run(Joined(no_receiver, NoScheduler(), "publisher", "counts")), LONG_S)
        finally:
            self.watch.close()
            self.shelf.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a")  # short, because a socket would lie in it


def test_a_guest_that_dies_too_often_ends_the_executor_with_the_cause(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner("import sys; print('no room for it', flush=True); sys.exit(3)"))
    with pytest.raises(EngineError, match=r"lent is given up after 1 restarts: lent ended with code 3 while starting"):
        asyncio.run(scene.run())
    assert scene.floor.placed == [child.pid for child in scene.spawner.children]
    assert len(scene.floor.placed) == 2
    assert scene.metrics.registry.get_sample_value("rose_executor_guest_restarts_total") == 1


def test_a_guest_that_cannot_be_placed_does_not_run(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner("import time; time.sleep(600)"))
    scene.floor.refuses = True

    async def check() -> None:
        with pytest.raises(ClusterError, match="the kernel refuses"):
            await scene.run()
        (child,) = scene.spawner.children
        assert await asyncio.wait_for(child.wait(), LONG_S) == -signal.SIGKILL

    asyncio.run(check())


def test_an_executor_that_is_stopped_while_its_guest_starts_leaves_nothing(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner("import time; time.sleep(600)"))

    async def check() -> None:
        running = asyncio.create_task(scene.run())
        while not scene.spawner.children:
            await asyncio.sleep(0.01)
        with closing(BoardReader(folder / "board")) as board:
            while board.read(QUOTA, time.monotonic()).state is None:
                await asyncio.sleep(0.01)
        while not scene.floor.renewed:  # what would end the guest in our place is looked after
            await asyncio.sleep(0.01)
        assert scene.agent.unhealthy() == ""
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        (child,) = scene.spawner.children
        assert child.exit_code is not None
        assert scene.floor.thawed >= 1

    asyncio.run(check())
    parts = {part.name: (part.state, part.detail) for part in scene.status.page().parts}
    assert parts["serving"] == ("unknown", "the serving half was never written")
    assert parts["tier"] == ("unseen", "the serving engine cannot be seen, so the guest computes nothing")
    assert parts["scheduler"] == ("no answer", "away")


def test_a_guest_that_ends_is_watched_until_it_has_ended() -> None:
    told: list[str] = []
    begun, ending, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def watched() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            told.append("watch")

    async def lives(joined: Joined) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()
            told.append("guest")

    async def check() -> None:
        watch: Any = SimpleNamespace(run=watched)
        guest: Any = SimpleNamespace(run=lives, look_for_stopped=asyncio.Event().wait)
        nothing: Any = None
        agent = Agent(guest, watch, nothing, nothing)
        running = asyncio.create_task(agent.run(Joined(no_receiver, NoScheduler(), "publisher", "counts")))
        await begun.wait()
        running.cancel()
        await ending.wait()
        assert told == []
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(check())
    assert told == ["guest", "watch"]


def test_a_disk_without_room_for_a_guests_page_is_waited_for_and_counts_as_no_death(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(folder, tiny_model, Spawner("import sys; sys.exit(3)"), restarts_max=0)
    monkeypatch.setattr(supervisor, "_ROOM_AGAIN_S", 0.01)
    allocate, asked = os.posix_fallocate, list[int]()

    def full(fd: int, offset: int, size: int) -> None:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder / ".lent.")):
            allocate(fd, offset, size)
            return
        asked.append(size)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    def shown() -> tuple[str, str]:
        found = [(part.state, part.detail) for part in scene.status.page().parts if part.name == "guest"]
        return found[0] if found else ("", "")

    async def check() -> None:
        running = asyncio.create_task(scene.run())
        while len(asked) < 5 or shown()[0] != "waits":
            assert not running.done()
            await asyncio.sleep(0.01)
        assert "has no room for a token page" in shown()[1]
        assert not scene.spawner.children
        while ("room for its token page", "lent") not in {(wait.what, wait.whom) for wait in scene.waits.snapshot()}:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(EngineError, match="ended with code 3"):
            await running

    asyncio.run(check())
    assert len(scene.spawner.children) == 1


def test_a_guest_that_cannot_be_thawed_at_the_end_is_told_and_ended_all_the_same(
    folder: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(folder, tiny_model, Spawner("import time; time.sleep(600)"))
    scene.floor.stuck = "the group is busy"

    async def check() -> None:
        running = asyncio.create_task(scene.run())
        while not scene.spawner.children:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert scene.spawner.children[0].exit_code is not None

    asyncio.run(check())
    assert any("the guest cannot be thawed" in line and "the group is busy" in line for line in caplog.messages)


def test_an_executor_that_looks_no_more_says_so(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    assert scene.agent.unhealthy() == ""
    scene.watch.looked_at_s -= UNSEEN_S
    assert scene.agent.unhealthy() == "the board was last looked at 1.0 s ago; the executor hangs"
    (folder / "board").unlink()
    (folder / "board").mkdir()
    scene.watch.look()
    assert "cannot open the board" in scene.agent.unhealthy()
    scene.watch.close()
    scene.shelf.close()


def test_alive_is_the_guest_of_now_until_it_is_known_to_be_dead(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    assert not scene.agent.alive("")
    assert not scene.agent.alive("a1")
    process = SimpleNamespace(incarnation="a1", alive=True)
    scene.agent._guest.process = process  # type: ignore[assignment]
    assert scene.agent.alive("a1")
    assert not scene.agent.alive("b2")
    dead = asyncio.Event()
    scene.agent._guest.life = SimpleNamespace(live=SimpleNamespace(incarnation="a1", dead=dead))  # type: ignore[assignment]
    assert scene.agent.alive("a1")
    dead.set()
    assert not scene.agent.alive("a1")
    scene.agent._guest.life = None  # its life is over, and no other has begun
    process.alive = False
    assert not scene.agent.alive("a1")
    scene.watch.close()
    scene.shelf.close()


def part(scene: Scene, name: str) -> tuple[str, str]:
    (found,) = ((part.state, part.detail) for part in scene.status.page().parts if part.name == name)
    return found


def test_a_starved_guest_is_named_and_counted_at_the_next_look(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    now_s = time.monotonic()
    life = SimpleNamespace(followed=SimpleNamespace(version=3))
    idle = ServingState(steps=9, stepped_at_s=now_s)

    def shown(guest: GuestState) -> tuple[str, str, float | None]:
        scene.watch.seen = Looked(Reading(idle), Reading(guest))
        scene.watch.rules.step(scene.watch.seen, now_s)
        scene.agent._figures.show(scene.watch, life, scene.agent._guest.lent(), NoScheduler(), 0)  # type: ignore[arg-type]
        return *part(scene, "guest"), scene.metrics.registry.get_sample_value("rose_executor_starvations_total")

    assert shown(GuestState(steps=1, waiting=2))[::2] == ("lent", 0)
    state, detail, count = shown(GuestState(steps=2, waiting=2, starved_at_s=now_s - 0.5, starvations=1))
    assert (state, count) == ("starved", 1)
    assert detail.startswith("its quota is below what any of 2 waiting requests needs, for ")
    assert shown(GuestState(steps=3, running=2, starvations=1))[::2] == ("lent", 1)
    # From the board's word to the executor's own page and metrics.
    assert LOOK_S + SHOW_EVERY_S < 1.0
    scene.watch.close()
    scene.shelf.close()


def test_without_a_board_the_tier_is_what_nobody_sees(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))

    def shown() -> tuple[str, str, float | None]:
        scene.agent._figures.show(scene.watch, None, scene.agent._guest.lent(), NoScheduler(), 0)
        running = scene.metrics.registry.get_sample_value("rose_executor_requests", {"who": "serving"})
        return part(scene, "serving")[0], part(scene, "tier")[0], running

    with closing(HalfWriter(folder / "board", SERVING)) as serving:
        serving.write(ServingState(steps=9, running=2, decoding=2, stepped_at_s=time.monotonic()))
        assert scene.watch.look()
    assert shown() == ("serving", "board", 2)
    (folder / "board").unlink()
    (folder / "board").mkdir()
    scene.watch._whole_at_s = 0.0
    assert not scene.watch.look()
    assert shown() == ("unknown", "unseen", None)
    scene.watch.close()
    scene.shelf.close()


def test_what_a_dead_guest_left_on_the_board_is_not_counted_again(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    figures, nobody = scene.agent._figures, NoScheduler()

    def show(preemptions: int | None, starvations: int = 0) -> tuple[float | None, ...]:
        blank = dict.fromkeys(GuestState._fields, 0)
        state = GuestState(**(blank | {"preemptions": preemptions, "starvations": starvations}))  # type: ignore[arg-type]
        scene.watch.seen = Looked(Reading(None), Reading(None if preemptions is None else state))
        figures.show(scene.watch, None, scene.agent._guest.lent(), nobody, 0)
        value = scene.metrics.registry.get_sample_value
        return value("rose_executor_preemptions_total"), value("rose_executor_starvations_total")

    assert show(5, 2) == (5, 2)
    figures.restarted()
    assert show(5, 2) == (5, 2)
    assert show(1, 0) == (6, 2)
    figures.restarted()
    assert show(1, 0) == (6, 2)
    assert show(None) == (6, 2)
    assert show(4, 1) == (10, 3)
    scene.watch.close()
    scene.shelf.close()


def test_a_guest_that_gives_no_memory_back_is_named(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    scene.watch.rules.kv = KvBudget(KvPolicy(KvPool(pool_bytes=2**30, serving_bytes=2**29, guest_bytes=2**29)))

    def shown(guest: GuestState | None) -> str:
        scene.watch.seen = Looked(Reading(ServingState()), Reading(guest))
        scene.watch.rules.step(scene.watch.seen, time.monotonic())
        scene.agent._figures.show(scene.watch, None, scene.agent._guest.lent(), NoScheduler(), 0)
        return part(scene, "memory")[1]

    keeps = GuestState(kv_blocks_total=8, kv_blocks_resident=8)
    assert shown(None).endswith("so far")
    assert shown(keeps).endswith("512 are; 0 cuts so far; the guest gives no memory back")
    assert shown(None).endswith("back")
    assert shown(keeps._replace(kv_gives_back=True)).endswith("so far")
    scene.watch.close()
    scene.shelf.close()


def test_a_pool_without_room_for_a_request_is_shown_as_too_small(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    scene.watch.rules.kv = KvBudget(KvPolicy(KvPool(2**28, serving_bytes=2**28, guest_bytes=2**27)), 2**20)
    scene.agent._figures.show(scene.watch, None, scene.agent._guest.lent(), NoScheduler(), 0)
    state, words = part(scene, "memory")
    assert state == "too small"
    assert "set memory.pool_gib to 0.32 or more" in words
    scene.watch.close()
    scene.shelf.close()


def test_the_profile_that_is_shown_is_the_guests_own(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    for at in range(40):  # what the executor learns by itself says nothing of the guest
        scene.watch.profile.saw(StepShape(8, 1), 0.01 if at < 20 else 0.09, float(at))
    assert scene.watch.profile.drifted is not None
    own = f"from {scene.watch.profile.steps} steps; the guest has not said yet what its own cost"
    now_s = time.monotonic()
    holds = GuestState(profile_steps=300)
    drifted = holds._replace(step_margin=1.75, drifted_at_s=now_s - 7, drift_factor=2.5)

    def shown(guest: GuestState | None) -> tuple[str, str, float | None]:
        scene.watch.seen = Looked(Reading(None), Reading(guest))
        scene.agent._figures.show(scene.watch, None, scene.agent._guest.lent(), NoScheduler(), 0)
        margin = scene.metrics.registry.get_sample_value("rose_executor_step_margin")
        return *part(scene, "step profile"), margin

    assert shown(None) == ("kept", own, 1)
    assert shown(GuestState()) == ("unknown", "no step was seen yet: the guest begins with a few tokens", 1)
    assert shown(holds) == ("holds", "learnt from 300 steps", 1)
    assert shown(drifted) == ("drifted", "for 7 s, by a factor of 2.50; margin 1.75", 1.75)
    assert shown(None) == ("drifted", "for 7 s, by a factor of 2.50; margin 1.75", 1.75)  # it idles
    scene.agent._figures.restarted()
    assert shown(None) == ("kept", own, 1)
    scene.watch.close()
    scene.shelf.close()


def test_a_profile_that_was_found_is_shown_until_the_guest_says_how_well_its_own_holds(
    folder: Path, tiny_model: Path
) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    for at in range(40):
        scene.watch.profile.saw(StepShape(8, 1), 0.01, float(at))

    def shown(guest: GuestState | None) -> tuple[str, str]:
        scene.watch.seen = Looked(Reading(None), Reading(guest))
        scene.agent._figures.show(scene.watch, None, scene.agent._guest.lent(), NoScheduler(), 0)
        return part(scene, "step profile")

    steps = scene.watch.profile.steps
    assert shown(None) == ("kept", f"from {steps} steps; the guest has not said yet what its own cost")
    assert shown(GuestState(profile_steps=300)) == ("holds", "learnt from 300 steps")
    scene.watch.close()
    scene.shelf.close()


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (None, ("not asked yet", "there is no guest to offer yet")),
        ("away", ("no answer", "away")),
        ("", ("reached", "")),
    ],
)
def test_a_scheduler_is_reached_once_it_has_answered(
    folder: Path, tiny_model: Path, trouble: str | None, words: tuple[str, str]
) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    scene.agent._figures.show(scene.watch, None, scene.agent._guest.lent(), NoScheduler(trouble), 0)
    assert part(scene, "scheduler") == words
    scene.watch.close()
    scene.shelf.close()


def test_what_cannot_be_kept_of_the_profile_is_told_beside_it(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))

    def shown() -> tuple[str, str]:
        scene.watch.seen = Looked(Reading(None), Reading(GuestState(profile_steps=300)))
        scene.agent._figures.show(scene.watch, None, scene.agent._guest.lent(), NoScheduler(), 0)
        return part(scene, "step profile")

    scene.unkept = "no space left"
    assert shown() == ("holds", "learnt from 300 steps; what is learnt is not kept: no space left")
    scene.unkept = ""
    assert shown() == ("holds", "learnt from 300 steps")
    scene.watch.close()
    scene.shelf.close()


def test_what_a_guest_costs_that_is_asleep_or_gone_is_shown(folder: Path, tiny_model: Path) -> None:
    scene = Scene(folder, tiny_model, Spawner(""))
    figures, presence = scene.agent._figures, GuestPresence(PresenceRules(doze_s=0.0, settle_s=0.0), 10.0)
    figures.presence = presence

    def shown() -> tuple[str, str]:
        figures.show(scene.watch, None, scene.agent._guest.lent(), NoScheduler(), 0)
        return part(scene, "guest")

    def value(name: str, state: str) -> float | None:
        return scene.metrics.registry.get_sample_value(f"rose_executor_{name}", {"state": state})

    assert shown() == ("starting", "")
    assert [value("presence", state) for state in ("active", "asleep", "gone")] == [1, 0, 0]
    assert value("presence_bytes", "asleep") is None
    presence.step(Up(), 14.0)
    presence.step(Room(0, 100), 20.0)
    assert shown() == ("asleep", "its budget is less than one request needs")
    presence.step(Residue(312 * 2**20), 21.0)
    presence.step(Room(100, 100), 22.0)
    presence.step(Up(), 22.8)
    presence.step(Room(0, 100), 30.0)
    words = "its budget is less than one request needs, holds 312 MiB, woke in 0.8 s last time"
    assert shown() == ("asleep", words)
    presence.step(Room(0, 100, 0), 31.0)
    words = "what it holds even asleep is more than there is room for, started in 4.0 s last time"
    assert shown() == ("gone", words)
    assert [value("presence", state) for state in ("active", "asleep", "gone")] == [0, 0, 1]
    assert value("presence_bytes", "asleep") == 312 * 2**20
    assert value("presence_seconds", "gone") == 4.0
    scene.watch.close()
    scene.shelf.close()
