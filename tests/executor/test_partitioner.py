"""Partitioners: on this kernel where it has control groups that can be written, on a stand-in for it elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rose.cgroup import OwnGroups, own_groups
from rose.errors import ClusterError
from rose_executor import guest_groups, partition_groups
from rose_executor import partitioner as partitioner_module
from rose_executor.guest_groups import sweep, v1_groups, v2_groups
from rose_executor.partition_groups import GroupPartitioner
from rose_executor.partition_terms import Role
from rose_executor.partition_threads import ThreadPartitioner
from rose_executor.partitioner import Partitioner, pick_partitioner, would_pick

# A guest of two processes and two threads, which counts in a file how often it came round.
_GUEST = """
import os, sys, threading, time
os.fork()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
beat = open(sys.argv[1] + f".{os.getpid()}", "w")
while True:
    beat.write("x"); beat.flush(); time.sleep(0.005)
"""
CORE = min(os.sched_getaffinity(0))


class Busy:
    """A process of ours with a child."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen([sys.executable, "-c", _GUEST, str(folder / "beat")], start_new_session=True)
        self.pid = self._process.pid
        until(lambda: len(self.pids()) == 2 and len(self.beats()) == 2 and len(self.threads()) == 4)

    def pids(self) -> list[int]:
        return [self.pid, *(child.pid for child in psutil.Process(self.pid).children())]

    def threads(self) -> list[int]:
        return [int(name) for pid in self.pids() for name in os.listdir(f"/proc/{pid}/task")]

    def beats(self) -> dict[str, int]:
        return {file.name: file.stat().st_size for file in self._folder.glob("beat.*")}

    def end(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(20)


def until(what: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Busy]:
    guest = Busy(tmp_path)
    yield guest
    guest.end()


def kernel_partitioner() -> GroupPartitioner:
    """One with real groups. Skips where this machine allows none."""
    for found in (v2_groups(own_groups()), v1_groups(own_groups())):
        if found is not None:
            try:
                return GroupPartitioner(found, [CORE])
            except ClusterError:
                continue
    pytest.skip("no control group can be made here")


def threads_only() -> ThreadPartitioner:
    return ThreadPartitioner([CORE], "a test")


@pytest.mark.parametrize("make", [kernel_partitioner, threads_only])
def test_a_guest_is_frozen_with_all_its_processes_and_goes_on(make: Callable[[], Partitioner], busy: Busy) -> None:
    partitioner = make()
    try:
        partitioner.place(busy.pid, Role.GUEST)
        partitioner.freeze()
        time.sleep(0.1)  # cgroup v1 freezes process by process
        still = busy.beats()
        assert len(still) == 2
        time.sleep(0.1)
        assert busy.beats() == still
        partitioner.thaw()
        until(lambda: all(busy.beats()[name] > count for name, count in still.items()))
    finally:
        partitioner.thaw()
        busy.end()
        partitioner.close()


@pytest.mark.parametrize("make", [kernel_partitioner, threads_only])
def test_every_thread_is_pinned_and_serving_keeps_its_scheduling(make: Callable[[], Partitioner], busy: Busy) -> None:
    partitioner = make()
    try:
        partitioner.place(busy.pid, Role.SERVING)
        threads = busy.threads()
        assert len(threads) == 4
        assert all(os.sched_getaffinity(thread) == {CORE} for thread in threads)
        assert all(os.sched_getscheduler(thread) == os.SCHED_OTHER for thread in threads)
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {os.getpriority(os.PRIO_PROCESS, 0)}
        assert "rose-guest" not in Path(f"/proc/{busy.pid}/cgroup").read_text()
    finally:
        partitioner.close()


def test_without_groups_every_thread_of_a_guest_is_of_the_idle_class(busy: Busy) -> None:
    threads_only().place(busy.pid, Role.GUEST)
    assert all(os.sched_getscheduler(thread) == os.SCHED_IDLE for thread in busy.threads())
    assert all(os.getpriority(os.PRIO_PROCESS, thread) == 19 for thread in busy.threads())


def test_without_groups_the_guests_session_weighs_least_and_ours_stays(busy: Busy) -> None:
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel does not weigh sessions")
    ours = Path("/proc/self/autogroup").read_text("ascii")
    threads_only().place(busy.pid, Role.GUEST)
    assert Path(f"/proc/{busy.pid}/autogroup").read_text("ascii").endswith(" nice 19\n")
    stays = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    threads_only().place(stays.pid, Role.GUEST)
    stays.communicate()
    assert Path("/proc/self/autogroup").read_text("ascii") == ours


def test_without_groups_a_guest_leaves_the_core_to_whoever_wants_it_in_another_session() -> None:
    """What the idle class alone does not do where the kernel weighs sessions."""
    spin = f"import os; os.sched_setaffinity(0, {{{CORE}}})\nwhile True: pass"
    guest, serving = (subprocess.Popen([sys.executable, "-c", spin], start_new_session=True) for _ in range(2))
    try:
        threads_only().place(guest.pid, Role.GUEST)
        used = [sum(psutil.Process(one.pid).cpu_times()[:2]) for one in (guest, serving)]
        until(lambda: sum(psutil.Process(serving.pid).cpu_times()[:2]) - used[1] > 1.0, timeout_s=120.0)
        assert sum(psutil.Process(guest.pid).cpu_times()[:2]) - used[0] < 0.3
    finally:
        for one in (guest, serving):
            one.kill()
            one.wait()


def test_a_guests_group_gets_what_others_leave_and_is_removed_with_its_maker(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_groups, "_ENDING_S", 60.0)  # what is of the idle class may die late
    partitioner = kernel_partitioner()
    partitioner.place(busy.pid, Role.GUEST)
    groups = Path(f"/proc/{busy.pid}/cgroup").read_text()
    (name,) = {line.rsplit("/", 1)[1] for line in groups.splitlines() if "rose-guest-" in line}
    assert "cpu" in partitioner.describe().name
    folders = [parent / name for parent in partitioner._groups.parents]
    assert all(folder.is_dir() for folder in folders)
    assert all(str(pid) in (folders[0] / "cgroup.procs").read_text().split() for pid in busy.pids())
    assert sweep(partitioner._groups) == []  # its maker lives
    busy.end()
    partitioner.close()
    assert partitioner.left == ()
    assert not any(folder.exists() for folder in folders)


def test_a_guest_that_still_runs_keeps_its_group_and_the_next_start_ends_it(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_groups, "_ENDING_S", 0.0)
    partitioner = kernel_partitioner()
    partitioner.place(busy.pid, Role.GUEST)
    partitioner.close()
    assert [folder.is_dir() for folder in partitioner.left] == [True] * len(partitioner._groups.parents)
    assert partitioner._name in Path(f"/proc/{busy.pid}/cgroup").read_text()  # not set free
    assert partitioner._name in sweep(partitioner._groups)  # and what others left here meanwhile
    assert not any(folder.exists() for folder in partitioner.left)


def test_the_next_start_ends_what_a_crash_left_frozen_and_touches_no_other_group(busy: Busy) -> None:
    crashed = kernel_partitioner()
    groups = crashed._groups
    crashed.place(busy.pid, Role.GUEST)
    crashed.freeze()
    pids = busy.pids()
    other = groups.cpu / "not-of-rose"
    other.mkdir()
    try:
        crashed._unlock()  # as the kernel does for a process that is killed
        swept = sweep(groups)
        assert crashed._name in swept
        assert other.is_dir()
        assert not any((parent / crashed._name).exists() for parent in groups.parents)
        until(lambda: all(not psutil.pid_exists(p) or psutil.Process(p).status() == "zombie" for p in pids))
    finally:
        other.rmdir()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that makes a group's files as cgroup v2 does."""
    top = tmp_path / "cgroup"
    top.mkdir()
    (top / "cgroup.controllers").write_text("cpu memory\n")
    (top / "cgroup.subtree_control").write_text("\n")

    def make(folder: Path) -> None:
        folder.mkdir()
        for name in ("cgroup.procs", "cgroup.freeze", "cpu.idle", "cpu.weight", "cpu.max"):
            (folder / name).write_text("")

    monkeypatch.setattr(guest_groups, "make_group", make)
    monkeypatch.setattr(guest_groups, "remove_group", shutil.rmtree)
    return top


def test_v2_writes_what_the_kernels_documents_say(stand_in: Path, busy: Busy) -> None:
    groups = v2_groups(OwnGroups({}, stand_in))
    assert groups is not None
    partitioner = GroupPartitioner(groups, [])
    (group,) = stand_in.glob("rose-guest-*")
    assert (stand_in / "cgroup.subtree_control").read_text().startswith("+cpu")
    assert (group / "cpu.idle").read_text() == "1"
    partitioner.place(busy.pid, Role.GUEST)
    assert (group / "cgroup.procs").read_text().strip() != ""
    partitioner.freeze()
    assert (group / "cgroup.freeze").read_text() == "1"
    partitioner.thaw()
    assert (group / "cgroup.freeze").read_text() == "0"
    assert partitioner.describe().name == "cgroup v2 (cpu.idle)"
    assert partitioner.describe().holds
    partitioner.close()
    assert not group.exists()


def test_a_kernel_without_the_idle_class_gets_the_smallest_weight(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = guest_groups.make_group

    def older(folder: Path) -> None:
        make(folder)
        (folder / "cpu.idle").unlink()

    monkeypatch.setattr(guest_groups, "make_group", older)
    groups = v2_groups(OwnGroups({}, stand_in))
    assert groups is not None
    described = GroupPartitioner(groups, []).describe()
    assert described.name == "cgroup v2 (cpu.weight)"
    assert "smallest weight" in described.binds
    assert next(stand_in.glob("rose-guest-*/cpu.weight")).read_text() == "1"


def test_what_cannot_be_made_is_refused_and_leaves_nothing(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = v2_groups(OwnGroups({}, stand_in))
    assert groups is not None
    monkeypatch.setattr(guest_groups, "make_group", Path.mkdir)  # and no file appears
    with pytest.raises(ClusterError, match="no group can be made"):
        GroupPartitioner(groups, [])
    assert not list(stand_in.glob("rose-guest-*"))


@pytest.mark.parametrize("moment", ["made", "opened", "swept right now"])
def test_a_group_that_another_executor_sweeps_as_it_is_made_is_made_again(
    moment: str, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, make, flock = v2_groups(OwnGroups({}, stand_in)), guest_groups.make_group, fcntl.flock
    assert groups is not None
    locks: list[int] = []

    def made(folder: Path) -> None:
        make(folder)
        if locks:
            return
        locks.append(os.open(folder, os.O_RDONLY))
        if moment == "made":
            assert sweep(groups) == [folder.name]
        elif moment == "swept right now":
            flock(locks[0], fcntl.LOCK_EX)

    def opened(fd: int, how: int) -> None:
        if moment == "opened" and len(locks) == 1:
            locks.append(fd)
            assert len(sweep(groups)) == 1
        flock(fd, how)

    monkeypatch.setattr(guest_groups, "make_group", made)
    monkeypatch.setattr(fcntl, "flock", opened)
    partitioner = GroupPartitioner(groups, [], sweeps=False)
    (left,) = stand_in.glob("rose-guest-*")
    assert left.name == partitioner._name
    assert sweep(groups) == []  # it is locked
    partitioner.close()
    assert not left.exists()
    os.close(locks[0])


def test_groups_that_are_swept_again_and_again_are_given_up_with_what_happened(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guest_groups, "make_group", lambda folder: None)
    monkeypatch.setattr(partitioner_module, "own_groups", lambda root: OwnGroups({}, stand_in))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ClusterError, match="executors that start here removed 20 new groups") as refused:
        pick_partitioner(share=0.5)
    assert "root" not in refused.value.to_do
    assert any("kept by no control group" in line and "removed 20 new groups" in line for line in caplog.messages)


def test_a_sweep_releases_what_it_kills_before(busy: Busy) -> None:
    crashed = kernel_partitioner()
    crashed.place(busy.pid, Role.GUEST)
    pids = set(busy.pids())
    crashed._unlock()
    released: list[tuple[set[int], bool]] = []
    sweep(crashed._groups, lambda pids: released.append((set(pids), all(map(psutil.pid_exists, pids)))))
    crashed._watchdog.close()
    assert released == [(pids, True)]


def test_a_machine_without_groups_is_served_by_the_idle_class_and_told_so(tmp_path: Path) -> None:
    partitioner = pick_partitioner(root=tmp_path)
    assert isinstance(partitioner, ThreadPartitioner)
    assert "no control group with a processor controller" in partitioner.describe().costs
    assert not partitioner.describe().holds  # a guest may leave its class
    assert v1_groups(OwnGroups({}, None)) is None
    assert v2_groups(OwnGroups({}, tmp_path)) is None


@pytest.mark.parametrize("core", [4095, -1, 2**31, 10**30])
def test_cores_that_are_not_there_are_refused(core: int) -> None:
    with pytest.raises(ClusterError, match=rf"cores \[{core}\] cannot be used"):
        pick_partitioner([core])


def test_an_executor_may_run_beside_the_cores_that_it_shares_out(busy: Busy) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("two cores are needed")
    os.sched_setaffinity(0, others)
    try:
        ThreadPartitioner({first}, "").place(busy.pid, Role.SERVING)
        assert os.sched_getaffinity(0) == set(others)
    finally:
        os.sched_setaffinity(0, {first, *others})
    assert os.sched_getaffinity(busy.pid) == {first}


def test_a_process_that_is_gone_is_refused(busy: Busy) -> None:
    busy.end()
    with pytest.raises(ClusterError, match="is gone"):
        threads_only().place(busy.pid, Role.GUEST)


def test_a_guest_that_is_gone_is_frozen_in_vain(busy: Busy) -> None:
    partitioner = threads_only()
    partitioner.place(busy.pid, Role.GUEST)
    busy.end()
    partitioner.freeze()
    partitioner.thaw()


def test_one_process_that_a_signal_does_not_reach_is_told_and_keeps_it_from_no_other(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitioner, kill = threads_only(), os.kill
    partitioner.place(busy.pid, Role.GUEST)

    def refused(pid: int, signum: int) -> None:
        if pid == busy.pid:
            raise PermissionError(1, "Operation not permitted")
        kill(pid, signum)

    monkeypatch.setattr(os, "kill", refused)
    (child,) = set(busy.pids()) - {busy.pid}
    with pytest.raises(ClusterError, match=rf"SIGSTOP does not reach .*{{{busy.pid}: 'Operation not permitted'}}"):
        partitioner.freeze()
    until(lambda: psutil.Process(child).status() == psutil.STATUS_STOPPED)
    monkeypatch.undo()
    partitioner.thaw()
    until(lambda: psutil.Process(child).status() != psutil.STATUS_STOPPED)


def test_where_there_is_no_freezer_nothing_is_frozen_and_there_is_nothing_to_thaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "cpu.idle").write_text("")

    monkeypatch.setattr(guest_groups, "make_group", make)
    monkeypatch.setattr(guest_groups, "remove_group", shutil.rmtree)
    groups = v1_groups(OwnGroups({"cpu": tmp_path}, None))
    assert groups is not None
    with contextlib.closing(GroupPartitioner(groups, [])) as partitioner:
        with pytest.raises(ClusterError, match="no freezer here"):
            partitioner.freeze()
        partitioner.thaw()


def spinning(cores: set[int]) -> subprocess.Popen[bytes]:
    code = f"import os; os.sched_setaffinity(0, {cores})\nwhile True: pass"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def test_a_share_holds_a_running_guest_and_may_be_changed_and_taken_away() -> None:
    """On a core that nobody else wants: a weight alone would give the guest all of it."""
    partitioner = kernel_partitioner()
    guest = spinning({CORE})
    group = partitioner._groups.cpu / partitioner._name

    def throttled() -> int:
        stats = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return int(stats["nr_throttled"])

    def used_s() -> float:
        return sum(psutil.Process(guest.pid).cpu_times()[:2])

    try:
        partitioner.place(guest.pid, Role.GUEST)
        assert throttled() == 0
        partitioner.set_share(0.25)
        assert "at most 25% of 1 cores in each 10 ms" in partitioner.describe().binds
        before_s, began_s = used_s(), time.monotonic()
        time.sleep(0.5)
        assert used_s() - before_s <= 0.25 * (time.monotonic() - began_s) + 0.05
        partitioner.set_share(0.001)  # one millisecond a second, which even a busy core gives it
        settled = throttled()
        until(lambda: throttled() > settled, timeout_s=120.0)
        partitioner.set_share(None)
        assert "at most" not in partitioner.describe().binds
        before_s = used_s()
        until(lambda: used_s() > before_s + 0.05, timeout_s=120.0)
    finally:
        guest.kill()
        guest.wait()
        partitioner.close()


def test_a_share_is_there_from_the_start_and_one_that_cannot_be_kept_leaves_nothing() -> None:
    kernel_partitioner().close()
    partitioner = pick_partitioner([CORE], share=0.5)
    assert isinstance(partitioner, GroupPartitioner)
    assert "50%" in partitioner.describe().binds
    folders = [parent / partitioner._name for parent in partitioner._groups.parents]
    partitioner.close()
    before = {folder for parent in partitioner._groups.parents for folder in parent.glob("rose-guest-*")}
    with pytest.raises(ClusterError, match=r"no kernel holds a group to 0\.0001 cores"):
        GroupPartitioner(partitioner._groups, [CORE], share=0.0001)
    assert before == {folder for parent in partitioner._groups.parents for folder in parent.glob("rose-guest-*")}
    assert not any(folder.exists() for folder in folders)


def test_without_groups_a_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be held to a share of the cores here: no control group") as refused:
        pick_partitioner(root=tmp_path, share=0.5)
    assert "partition.guest_share" in refused.value.to_do
    threads_only().set_share(None)


def test_a_share_in_v2_is_one_line_and_short_periods_are_the_rule(stand_in: Path) -> None:
    groups = v2_groups(OwnGroups({}, stand_in))
    assert groups is not None
    partitioner = GroupPartitioner(groups, [CORE], share=0.5)
    (limit,) = stand_in.glob("rose-guest-*/cpu.max")
    assert limit.read_text() == "5000 10000"
    partitioner.set_share(0.01)
    assert limit.read_text().startswith("1000 100000")
    limit.write_text("")
    partitioner.set_share(None)
    assert limit.read_text() == "max 10000"
    partitioner.close()


def test_a_kernel_without_quotas_says_so(stand_in: Path) -> None:
    groups = v2_groups(OwnGroups({}, stand_in))
    assert groups is not None
    partitioner = GroupPartitioner(groups, [CORE])
    next(stand_in.glob("rose-guest-*/cpu.max")).unlink()
    with pytest.raises(ClusterError, match=r"cannot be held to 0\.5 cores") as refused:
        partitioner.set_share(0.5)
    assert "kernel with group quotas" in refused.value.expected
    assert "at most" not in partitioner.describe().binds


def test_v1_lifts_the_limit_while_the_period_changes(tmp_path: Path) -> None:
    groups = v1_groups(OwnGroups({"cpu": tmp_path}, None))
    assert groups is not None
    assert groups.quota(1.5) == (
        ("cpu.cfs_quota_us", "-1"),
        ("cpu.cfs_period_us", "10000"),
        ("cpu.cfs_quota_us", "15000"),
    )
    assert groups.quota(None) == (("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "10000"))


def test_looking_ends_no_orphan(busy: Busy) -> None:
    crashed = kernel_partitioner()
    crashed.place(busy.pid, Role.GUEST)
    crashed._watchdog.close()
    crashed._unlock()
    try:
        assert would_pick().name == crashed.describe().name
        assert all(psutil.pid_exists(pid) for pid in busy.pids())
        assert crashed._name in Path(f"/proc/{busy.pid}/cgroup").read_text()
    finally:
        busy.end()
        sweep(crashed._groups)
