"""Whatever becomes of an executor: guests that nobody else would end are gone, frozen ones too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from process_tools import DEADLINE_S, lives, until

from rose.cgroup import own_groups
from rose.errors import ClusterError
from rose_executor import partition_watchdog_main
from rose_executor.guest_groups import PREFIX, Groups, groups_of, v1_groups, v2_groups
from rose_executor.partition_groups import GroupPartitioner
from rose_executor.partition_mps import TimeSlices
from rose_executor.partition_terms import Role
from rose_executor.partition_threads import ThreadPartitioner
from rose_executor.partition_watchdog import Watchdog
from rose_executor.partition_watchdog_main import end_guests
from rose_executor.partitioner import Partitioner, pick_partitioner
from rose_executor.process_birth import birth_ticks

NO_GROUPS = Groups("v2", Path("/none"), None, (), "", "", "")
OWNER = Path(__file__).with_name("partition_owner_main.py")


class Owner:
    """An executor with a placed guest, as a process."""

    def __init__(self, folder: Path, kind: str, *how: str) -> None:
        self._folder = folder
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen([sys.executable, str(OWNER), str(folder), kind, *how], env=environ)
        until((folder / "placed").exists, "the owner places no guest")
        kept_by, *pids = (folder / "placed").read_text().split()
        self.in_group = kept_by == "cgroup"
        self.guests = [int(pid) for pid in pids]

    def watchdogs(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [one for one in children if any("partition_watchdog_main" in word for word in one.cmdline())]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.guests:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def make(kind: str, *how: str) -> Owner:
        owners.append(Owner(tmp_path, kind, *how))
        if kind == "groups" and not owners[-1].in_group:
            pytest.skip("no control group can be made here")
        return owners[-1]

    yield make
    for owner in owners:
        owner.end()


def group_of(pid: int) -> list[Path]:
    """The folders of our groups that a process is in."""
    own = own_groups()
    parents = [parent for found in (v1_groups(own), v2_groups(own)) if found is not None for parent in found.parents]
    folders = [folder for parent in parents for folder in parent.glob(f"{PREFIX}*")]
    return [folder for folder in folders if str(pid) in (folder / "cgroup.procs").read_text().split()]


@pytest.mark.parametrize("kind", ["groups", "threads"])
@pytest.mark.parametrize("how", [(), ("frozen",)])
def test_a_killed_executor_leaves_no_guest_that_nobody_guards(
    kind: str, how: tuple[str, ...], owned: Callable[..., Owner]
) -> None:
    owner = owned(kind, *how)
    folders = group_of(owner.guests[0])
    assert bool(folders) == (kind == "groups")
    assert all(lives(pid) for pid in owner.guests)
    (watchdog,) = owner.watchdogs()
    owner.process.kill()
    until(lambda: not any(lives(pid) for pid in owner.guests), "a guest outlived its executor")
    until(lambda: not any(folder.exists() for folder in folders), "the group is left")
    until(lambda: not lives(watchdog.pid), "the watchdog does not end")


@pytest.mark.parametrize("kind", ["groups", "threads"])
def test_an_executor_may_die_before_its_watchdog_is_awake(kind: str, owned: Callable[..., Owner]) -> None:
    owner = owned(kind, "dies")
    until(lambda: not any(lives(pid) for pid in owner.guests), "a guest outlived its executor")


def test_a_stopped_executor_ends_nobody(owned: Callable[..., Owner]) -> None:
    """Its quota is stale by then, and the guest's gate shut; it may go on."""
    owner = owned("threads")
    (watchdog,) = owner.watchdogs()
    owner.process.send_signal(signal.SIGSTOP)
    watchdog.send_signal(signal.SIGCONT)
    until(lambda: watchdog.status() == psutil.STATUS_SLEEPING, "the watchdog does not sleep")
    assert all(lives(pid) for pid in owner.guests)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def test_a_watchdog_that_is_sent_away_ends_nobody() -> None:
    guest = sleeper()
    try:
        partitioner = ThreadPartitioner([], "a test")
        partitioner.place(guest.pid, Role.GUEST)
        process = partitioner._watchdog._process
        assert process is not None
        partitioner.close()
        assert process.returncode == 0
        assert guest.poll() is None
    finally:
        guest.kill()
        guest.wait()


def test_no_watchdog_runs_without_a_guest() -> None:
    serving = sleeper()
    try:
        partitioner = ThreadPartitioner([], "a test")
        partitioner.place(serving.pid, Role.SERVING)
        assert partitioner._watchdog._process is None
        partitioner.close()
    finally:
        serving.kill()
        serving.wait()


def test_a_watchdog_that_died_is_replaced_and_the_next_one_knows_all() -> None:
    guests = [sleeper(), sleeper()]
    watchdog = Watchdog(None)
    try:
        watchdog.guards(guests[0].pid)
        assert watchdog._process is not None
        watchdog._process.kill()
        watchdog._process.wait()
        watchdog.guards(guests[1].pid)
        assert watchdog._process.poll() is None
        assert watchdog._process.stdin is not None
        watchdog._process.stdin.close()  # as the kernel does for an executor that is gone
        for guest in guests:
            assert guest.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        for guest in guests:
            guest.kill()
            guest.wait()
        assert watchdog._process is not None
        watchdog._process.wait(DEADLINE_S)


def grouped() -> GroupPartitioner:
    partitioner = pick_partitioner()
    if not isinstance(partitioner, GroupPartitioner):
        partitioner.close()
        pytest.skip("no control group can be made here")
    return partitioner


@pytest.mark.parametrize("layer", ["bare", "time slices"])
@pytest.mark.parametrize("make", [grouped, lambda: ThreadPartitioner([], "a test")], ids=["groups", "threads"])
def test_a_dead_watchdog_is_renewed_and_ends_a_frozen_guest_of_an_executor_that_is_gone(
    make: Callable[[], GroupPartitioner | ThreadPartitioner], layer: str
) -> None:
    inner = make()
    partitioner: Partitioner = inner if layer == "bare" else TimeSlices(inner, "a test")
    guest, watchdog = sleeper(), inner._watchdog
    try:
        assert not partitioner.renew_watchdog()  # there is no guest
        assert watchdog._process is None
        partitioner.place(guest.pid, Role.GUEST)
        first = watchdog._process
        assert first is not None
        assert not partitioner.renew_watchdog()
        assert watchdog._process is first
        first.kill()
        first.wait()
        partitioner.freeze()
        assert partitioner.renew_watchdog()
        second = watchdog._process
        assert second is not None
        assert second.pid != first.pid
        if isinstance(inner, GroupPartitioner):
            inner._unlock()
        assert second.stdin is not None
        second.stdin.close()  # as the kernel does for an executor that is gone
        assert guest.wait(DEADLINE_S) == -signal.SIGKILL
        second.wait(DEADLINE_S)
        assert not partitioner.renew_watchdog()  # nobody is left to be guarded
        watchdog._process = None
    finally:
        guest.kill()
        guest.wait()
        partitioner.close()


def test_a_watchdog_that_cannot_be_started_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    guest, watchdog = sleeper(), Watchdog(None)

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    try:
        watchdog.guards(guest.pid)
        assert watchdog._process is not None
        watchdog._process.kill()
        watchdog._process.wait()
        with monkeypatch.context() as full:
            full.setattr(subprocess, "Popen", refused)
            for _ in range(2):
                with pytest.raises(ClusterError, match="no watchdog for the guest can be started"):
                    watchdog.renew()
        assert watchdog.renew()
    finally:
        watchdog.close()
        guest.kill()
        guest.wait()


def test_the_number_of_a_guest_that_is_gone_may_be_somebody_elses() -> None:
    stranger, guest = sleeper(), sleeper()
    watchdog = Watchdog(None)
    try:
        watchdog.guards(guest.pid)
        watchdog._guests[stranger.pid] = 1.0  # a process of that number, born at another time
        assert watchdog._tell(stranger.pid)
        assert watchdog._process is not None
        assert watchdog._process.stdin is not None
        watchdog._process.stdin.close()
        assert guest.wait(DEADLINE_S) == -signal.SIGKILL
        assert watchdog._process.wait(DEADLINE_S) == 0
        assert stranger.poll() is None
    finally:
        for one in (stranger, guest):
            one.kill()
            one.wait()


def test_a_guest_is_known_by_its_birth_whatever_the_machines_date_does(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = sleeper()
    watchdog = Watchdog(None)
    try:
        watchdog.guards(guest.pid)
        booted_s = psutil.boot_time()
        # What the kernel tells of the machine's start, and with that of all processes', when its date was set anew.
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: booted_s + 3600)
        end_guests(watchdog._guests, None, lambda pids: None)
        assert guest.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        watchdog.close()
        guest.kill()
        guest.wait()


def test_a_watchdog_whose_words_nobody_reads_any_more_ends_its_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    guest, (read, write) = sleeper(), os.pipe()
    os.close(read)
    troubles = [ClusterError("a group is busy")]

    def busy(*_: object) -> None:
        if troubles:
            raise troubles.pop()

    monkeypatch.setattr(partition_watchdog_main, "sweep", busy)
    try:
        with os.fdopen(write, "w", buffering=1) as closed, monkeypatch.context() as alone:
            alone.setattr(sys, "stderr", closed)
            end_guests({guest.pid: birth_ticks(guest.pid)}, NO_GROUPS, lambda pids: None)
            os.dup2(os.open(os.devnull, os.O_WRONLY), closed.fileno())
        assert not troubles
        assert guest.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        guest.kill()
        guest.wait()


def test_groups_survive_being_told(tmp_path: Path) -> None:
    for version, freezer in (("v1", tmp_path / "freezer"), ("v1", None), ("v2", tmp_path)):
        words = {"version": version, "cpu": str(tmp_path), "freezer": None if freezer is None else str(freezer)}
        groups = groups_of(words)
        assert isinstance(groups, Groups)
        assert groups.as_words() == words
