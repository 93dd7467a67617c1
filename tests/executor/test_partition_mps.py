"""A guest beside a serving engine under MPS, against a daemon that keeps NVIDIA's documented rules, in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_mps import Client, FakeMps
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ClusterError
from rose_executor import mps_preflight, mps_words
from rose_executor.engine_env import MPS_DIRECTORY
from rose_executor.mps_daemon import Answer, MpsDaemon, recognised
from rose_executor.mps_preflight import check_servers, find_daemon, pipe_directory, serving_client, writers
from rose_executor.mps_release import release
from rose_executor.partition_mps import MpsPartitioner, TimeSlices
from rose_executor.partition_terms import GuestLimits
from rose_executor.partition_threads import ThreadPartitioner
from rose_executor.partitioner import pick_on_gpu

ROOT = Path("/run/of-a-test/nvidia-mps")
UID = os.geteuid()
SERVING, GUEST, OTHER = 100, 200, 300
HALF = GuestLimits(share=0.5, memory_gib=2.0)
PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3])


class Gpu:
    """A GPU with a daemon; processes are numbers in `living`."""

    def __init__(self, protocol: int) -> None:
        self.living: set[int] = set()
        self.fake = FakeMps(protocol, str(ROOT), lambda pid: pid in self.living)
        self.asked: list[str] = []

    def ask(self, arguments: Any, text: str) -> Answer:
        self.asked.append(" ".join(arguments) or text.strip())
        return Answer(*self.fake.run(arguments, text))

    def daemon(self) -> MpsDaemon:
        return recognised(ROOT, self.ask)

    def start(self, pid: int, env: Mapping[str, str | None] | None = None, uid: int = UID) -> Client | str:
        """A process whose environment was that of everybody, changed by `env`."""
        self.living.add(pid)
        merged = {mps_words.PERCENTAGE: "90", **(env or {})}
        return self.fake.connect(pid, uid, {name: value for name, value in merged.items() if value is not None})

    def kill(self, pid: int) -> None:
        self.living.discard(pid)
        self.fake.look()

    def client(self, pid: int) -> Client:
        return self.fake.clients[pid]


def partitioner(gpu: Gpu, limits: GuestLimits = HALF, serving: tuple[int, ...] = (SERVING,)) -> MpsPartitioner:
    return MpsPartitioner(ThreadPartitioner([], "a test"), gpu.daemon(), limits, lambda: serving, ["Exclusive_Process"])


@PROTOCOLS
def test_a_guest_starts_with_its_ceiling_memory_and_priority_and_serving_keeps_all(protocol: int) -> None:
    gpu = Gpu(protocol)
    serving = gpu.start(SERVING)
    guest = gpu.start(GUEST, partitioner(gpu).guest_env())
    assert isinstance(serving, Client)
    assert isinstance(guest, Client)
    assert (guest.percent, guest.memory, guest.priority, guest.server) == (50.0, 2048, 1, serving.server)
    assert (serving.percent, serving.memory, serving.priority) == (90.0, None, 0)
    again = gpu.start(OTHER)  # serving after a restart: nothing of a guest's limits is left with the daemon
    assert isinstance(again, Client)
    assert (again.percent, again.memory, again.priority, again.server) == (90.0, None, 0, serving.server)


@PROTOCOLS
def test_without_limits_a_guest_only_gives_way(protocol: int) -> None:
    gpu = Gpu(protocol)
    gpu.start(SERVING)
    env = partitioner(gpu, GuestLimits()).guest_env()
    assert env[mps_words.PERCENTAGE] is None  # what the executor's own user has exported is not the guest's
    guest = gpu.start(GUEST, env)
    assert isinstance(guest, Client)
    assert (guest.percent, guest.memory, guest.priority) == (100.0, None, 1)
    assert env[MPS_DIRECTORY] == str(ROOT)


def test_the_memory_limit_is_for_each_gpu_in_v2() -> None:
    limits = mps_words.client_env(HALF, "/d", 2)
    assert limits[mps_words.MEMORY_LIMIT] == "0=2048M,1=2048M"
    assert mps_words.percentage(GuestLimits(share=0.014)) == 1
    assert mps_words.percentage(GuestLimits(share=0.001)) == 1
    assert mps_words.percentage(GuestLimits(share=0.999)) == 99


def test_a_servers_own_ceiling_counts_too_and_is_told_in_v2() -> None:
    gpu = Gpu(2)
    serving = gpu.start(SERVING)
    assert isinstance(serving, Client)
    gpu.fake.run((), f"set_active_thread_percentage {serving.server} 30")
    assert "at most 30 % of the GPU's threads" in partitioner(gpu).describe().binds
    assert serving.percent == 90.0  # it runs


@PROTOCOLS
def test_a_running_guest_keeps_what_it_has_and_nobody_pretends_otherwise(protocol: int) -> None:
    gpu = Gpu(protocol)
    gpu.start(SERVING)
    kept = partitioner(gpu)
    gpu.start(GUEST, kept.guest_env())
    partitioner(gpu, GuestLimits(share=0.1)).guest_env()
    assert gpu.client(GUEST).percent == 50.0
    with pytest.raises(ClusterError, match="share of a running MPS client cannot be changed"):
        kept.set_share(0.1)
    assert "a running one keeps what it has" in kept.describe().binds


@PROTOCOLS
def test_it_says_its_name_and_what_it_costs(protocol: int) -> None:
    gpu = Gpu(protocol)
    gpu.start(SERVING)
    described = partitioner(gpu).describe()
    assert described.name == f"MPS v{protocol}, none (idle scheduling class)"
    assert "at most 50 % of the GPU's threads" in described.binds
    assert "at most 2048 MiB" in described.binds
    assert "one fault domain" in described.costs
    assert "EXCLUSIVE_PROCESS" not in described.costs
    assert described.interference == 1.0
    shared = MpsPartitioner(ThreadPartitioner([], ""), gpu.daemon(), HALF, lambda: [SERVING], ["Default"])
    assert "is not EXCLUSIVE_PROCESS" in shared.describe().costs
    unseen = partitioner(gpu, serving=())
    assert "once the serving engine, which is not seen yet, is a client too" in unseen.describe().binds
    assert (shared.describe().holds, unseen.describe().holds) == (True, False)


@PROTOCOLS
def test_a_guest_is_terminated_before_it_is_killed_and_serving_goes_on(protocol: int) -> None:
    gpu = Gpu(protocol)
    gpu.start(SERVING)
    gpu.start(GUEST, partitioner(gpu).guest_env())
    release(gpu.daemon(), [GUEST, OTHER])
    gpu.kill(GUEST)
    assert gpu.fake.works(SERVING)
    assert gpu.start(OTHER) != "not ready"


@PROTOCOLS
def test_the_fake_knows_what_a_kill_alone_may_do(protocol: int) -> None:
    gpu = Gpu(protocol)
    gpu.start(SERVING)
    gpu.start(GUEST, partitioner(gpu).guest_env())
    gpu.kill(GUEST)
    assert not gpu.fake.works(SERVING)
    with pytest.raises(ClusterError, match=r"is (FAULT|Fault)") as refused:
        partitioner(gpu).guest_env()
    assert "the server recovers" in refused.value.to_do


def test_a_client_that_cannot_be_terminated_is_named_after_the_others_were() -> None:
    gpu = Gpu(2)
    daemon = gpu.daemon()
    for pid in (GUEST, OTHER, SERVING):
        gpu.start(pid)

    def refusing(arguments: Any, text: str) -> Answer:
        return Answer(0, "700\n", "") if text.endswith(f"{GUEST}\n") else gpu.ask(arguments, text)

    with pytest.raises(ClusterError, match=r"MPS client 200 of server .* could not be terminated: 700"):
        release(recognised(ROOT, refusing), [GUEST, OTHER])
    assert [gpu.client(pid).terminated for pid in (GUEST, OTHER, SERVING)] == [False, True, False]
    release(daemon, [])


def test_a_namespace_is_made_again_and_taken_back_and_one_in_use_stays() -> None:
    gpu = Gpu(3)
    gpu.start(SERVING)
    spaces = gpu.fake.servers[f"uid_{UID}"].namespaces
    kept = partitioner(gpu)
    kept.guest_env()
    (name,) = set(spaces) - {"default"}
    assert name.startswith(f"rose_{os.getpid()}_")
    gpu.fake.run(("namespace", "delete", name, f"--server=uid_{UID}"), "")
    gpu.start(GUEST, kept.guest_env())
    assert set(spaces) == {"default", name}
    kept.close()
    assert name in spaces  # its client would be cut off
    gpu.fake.leave(GUEST)
    again = partitioner(gpu)
    again.guest_env()
    again.close()
    assert set(spaces) == {"default", name}


def test_namespaces_of_executors_that_are_gone_are_removed() -> None:
    gpu = Gpu(3)
    gpu.start(SERVING)
    spaces = gpu.fake.servers[f"uid_{UID}"].namespaces
    left = {"rose_1_00ff", "rose_x", "rose_4194305", "batch"}
    for name in ("rose_4194305_00ff", *left):
        gpu.fake.run(("namespace", "create", name, f"--server=uid_{UID}"), "")
    kept = partitioner(gpu)
    kept.guest_env()
    kept.close()
    assert set(spaces) == {"default", *left}


def test_before_serving_is_there_a_v3_server_is_made_for_this_user() -> None:
    gpu = Gpu(3)
    kept = partitioner(gpu, serving=())
    guest = gpu.start(GUEST, kept.guest_env())
    serving = gpu.start(SERVING)
    assert isinstance(guest, Client)
    assert isinstance(serving, Client)
    assert guest.server == serving.server == f"uid_{UID}"


# What may be in the way.


@PROTOCOLS
def test_a_serving_engine_that_is_no_client_is_named(protocol: int) -> None:
    gpu = Gpu(protocol)
    assert gpu.start(SERVING, {mps_words.PIPE_DIRECTORY: "/nowhere"}) == "outside"
    with pytest.raises(ClusterError, match="is no client of the MPS daemon") as refused:
        serving_client(gpu.daemon(), [SERVING])
    assert f"{mps_words.PIPE_DIRECTORY}={ROOT}" in refused.value.to_do
    assert serving_client(gpu.daemon(), []) is None


@PROTOCOLS
def test_clients_of_another_pid_namespace_cannot_be_told_apart(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(protocol)
    gpu.start(SERVING)
    monkeypatch.setattr(mps_preflight.psutil, "pid_exists", lambda pid: False)
    with pytest.raises(ClusterError, match="by numbers of another pid namespace") as refused:
        serving_client(gpu.daemon(), [OTHER])
    assert "hostPID" in refused.value.to_do
    monkeypatch.setattr(mps_preflight.psutil, "pid_exists", lambda pid: True)
    with pytest.raises(ClusterError, match="is no client"):
        serving_client(gpu.daemon(), [OTHER])


@PROTOCOLS
def test_a_serving_engine_that_comes_up_outside_lets_no_guest_start(protocol: int) -> None:
    gpu = Gpu(protocol)
    serving: list[int] = []
    kept = MpsPartitioner(ThreadPartitioner([], ""), gpu.daemon(), HALF, lambda: serving, [])
    kept.guest_env()
    serving.append(SERVING)
    with pytest.raises(ClusterError, match="is no client"):
        kept.guest_env()


def test_another_users_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(2)
    serving = gpu.start(SERVING, uid=UID + 1)
    assert isinstance(serving, Client)
    assert gpu.start(GUEST) == "waits"
    monkeypatch.setattr("rose_executor.mps_daemon._uid_of", lambda pid: UID + 1)
    with pytest.raises(ClusterError, match=f"belongs to user {UID + 1}, and a guest would be user {UID}"):
        check_servers(gpu.daemon(), UID)
    monkeypatch.setattr("rose_executor.mps_daemon._uid_of", lambda pid: None)
    check_servers(gpu.daemon(), UID)  # of another pid namespace: nobody knows


def test_roots_server_takes_everybody_where_the_daemon_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(2)
    gpu.start(SERVING, uid=0)
    monkeypatch.setattr("rose_executor.mps_daemon._uid_of", lambda pid: 0)
    lines = [["/usr/bin/nvidia-cuda-mps-control", "-d"]]
    monkeypatch.setattr(mps_preflight, "_daemon_lines", lambda: lines)
    with pytest.raises(ClusterError, match="belongs to user 0"):
        check_servers(gpu.daemon(), 1000)
    lines[0].append("-multiuser-server")
    check_servers(gpu.daemon(), 1000)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(1, "", "Cannot find MPS control daemon process\n"),
        Answer(0, "Cannot find MPS control daemon process\n", ""),
        Answer(0, "name uid pid status\n", ""),
    ],
)
def test_a_daemon_that_speaks_neither_language_is_no_daemon(answer: Answer) -> None:
    with pytest.raises(ClusterError, match="no MPS control daemon answers") as refused:
        recognised(ROOT, lambda arguments, text: answer)
    assert f"{mps_words.PIPE_DIRECTORY}={ROOT} nvidia-cuda-mps-control -d" in refused.value.to_do


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (mps_words.pids, "Cannot find MPS control daemon process"),
        (mps_words.clients_of_ps, "Cannot find it"),
        (mps_words.clients_of_ps, "PID ID SERVER DEVICE NAMESPACE COMMAND\nnine 0 6472 GPU 1 ./x"),
        (mps_words.clients_of_list, "51023,training"),
        (mps_words.clients_of_list, "pid,server,device,namespace,cmd"),
        (mps_words.servers_of_list, "nothing"),
        (mps_words.ceiling, "not a number"),
    ],
)
def test_what_is_not_understood_is_no_answer(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ClusterError, match="the MPS control daemon answers") as refused:
        read(text)
    assert "documented" in refused.value.expected


def test_the_examples_of_the_documents_are_understood() -> None:
    text = (
        "PID ID SERVER DEVICE NAMESPACE COMMAND\n"
        "9741 0 6472 GPU-cb1213a3-d6a4-be7f 4026531836 ./nbody\n"
        "9743 0 6472 GPU-cb1213a3-d6a4-be7f 4026531836 ./matrixMul --wA 3\n"
        "9743 1 6472 GPU-74d43ed3-cdf7-e667 4026531836 ./matrixMul --wA 3\n"
    )
    assert [(one.pid, one.server) for one in mps_words.clients_of_ps(text)] == [(9741, "6472"), (9743, "6472")]
    assert mps_words.clients_of_ps("") == []
    rows = "51023,training,0,default,python train.py\n51087,training,0,high_priority,python eval.py, twice\n"
    assert [(one.pid, one.server) for one in mps_words.clients_of_list(rows)] == [
        (51023, "training"),
        (51087, "training"),
    ]
    (server,) = mps_words.servers_of_list("training,1000,48201,Ready,/run/nvidia-mps/training,GPU-abcd-1234,-\n")
    assert (server.name, server.uid, server.status) == ("training", 1000, "Ready")


def test_pipes_are_looked_for_where_they_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mps_words.PIPE_DIRECTORY, raising=False)
    monkeypatch.setattr(mps_preflight.shutil, "which", lambda name: name)
    first, second = tmp_path / "tmp", tmp_path / "run"
    with pytest.raises(ClusterError, match=re.escape(f"no MPS control daemon has its pipes in {first}")) as refused:
        find_daemon(directories=(first, second))
    assert mps_words.PIPE_DIRECTORY in refused.value.to_do
    second.mkdir()
    (second / "control").touch()
    assert pipe_directory((first, second)) == second
    monkeypatch.setenv(mps_words.PIPE_DIRECTORY, str(tmp_path / "named"))
    assert pipe_directory((first, second)) == tmp_path / "named"
    monkeypatch.setattr(mps_preflight.shutil, "which", lambda name: None)
    with pytest.raises(ClusterError, match="is not installed"):
        find_daemon()


def test_pipes_of_another_user_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "control").touch()
    monkeypatch.setattr(mps_preflight.shutil, "which", lambda name: name)
    monkeypatch.setenv(mps_words.PIPE_DIRECTORY, str(tmp_path))
    monkeypatch.setattr(mps_preflight.os, "access", lambda path, how: how == os.X_OK)  # root may do all
    with pytest.raises(ClusterError, match=r"control belongs to user \d+ \(mode \d+\), this is user \d+"):
        find_daemon()


def test_who_writes_on_a_file_is_seen_and_who_reads_is_not(tmp_path: Path) -> None:
    file = tmp_path / "board"
    file.touch()
    (tmp_path / "link").symlink_to(file)
    assert writers(file) == frozenset()
    for mode in ("r", "r+"):
        code = f"import sys; file = open(sys.argv[1], '{mode}'); print(flush=True); sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            assert writers(tmp_path / "link") == (frozenset({holder.pid}) if mode == "r+" else frozenset())
            holder.communicate()


# What is picked.


def no_daemon() -> MpsDaemon:
    raise ClusterError("there is no daemon")


@PROTOCOLS
def test_with_a_daemon_mps_is_picked_with_what_the_processor_has(protocol: int) -> None:
    gpu = Gpu(protocol)
    gpu.start(SERVING)
    picked = pick_on_gpu([], HALF, lambda: [SERVING], ["Default"], gpu.daemon)
    try:
        assert isinstance(picked, MpsPartitioner)
        assert re.match(rf"MPS v{protocol}, (cgroup v\d|none) \(", picked.describe().name)
    finally:
        picked.close()


def test_without_a_daemon_both_take_turns_by_name_and_the_guest_stays_outside() -> None:
    picked = pick_on_gpu([], GuestLimits(), lambda: [SERVING], ["Default"], no_daemon)
    try:
        assert isinstance(picked, TimeSlices)
        described = picked.describe()
        assert not described.holds
        assert described.name.startswith("time slices, ")
        assert "nothing on the GPU" in described.binds
        assert "no MPS (there is no daemon)" in described.costs
        assert Gpu(2).start(GUEST, picked.guest_env()) == "outside"
        with pytest.raises(ClusterError, match="there is no daemon"):
            picked.set_share(0.5)
        picked.set_share(None)
    finally:
        picked.close()


@PROTOCOLS
def test_beside_a_serving_engine_that_is_no_client_both_take_turns(protocol: int) -> None:
    gpu = Gpu(protocol)
    picked = pick_on_gpu([], GuestLimits(), lambda: [SERVING], ["Default"], gpu.daemon)
    assert isinstance(picked, TimeSlices)
    assert f"processes [{SERVING}]) is no client" in picked.describe().costs
    picked.close()


@pytest.mark.parametrize("limits", [GuestLimits(share=0.5), GuestLimits(memory_gib=1.0)])
def test_limits_that_nothing_keeps_are_refused(limits: GuestLimits) -> None:
    with pytest.raises(ClusterError, match="cannot be held to a share or to memory of the GPU: there is no daemon"):
        pick_on_gpu([], limits, list, ["Default"], no_daemon)


def test_where_only_one_process_may_compute_no_guest_starts() -> None:
    with pytest.raises(ClusterError, match="Exclusive_Process and there is no daemon: only one process") as refused:
        pick_on_gpu([], GuestLimits(), list, ["Default", "Exclusive_Process"], no_daemon)
    assert "nvidia-smi -c DEFAULT" in refused.value.to_do
    for find in (no_daemon, Gpu(2).daemon):
        with pytest.raises(ClusterError, match="compute mode is Prohibited"):
            pick_on_gpu([], GuestLimits(), list, ["Prohibited"], find)


# Whatever happens in whatever order.

Moves = st.lists(
    st.one_of(
        st.tuples(st.just("guest"), st.integers(0, 4), st.sampled_from([None, 0.1, 0.5, 0.99])),
        st.tuples(st.just("serving"), st.integers(5, 6)),
        st.tuples(st.just("server"), st.integers(1, 100)),
        st.tuples(st.just("default"), st.integers(1, 100)),
        st.tuples(st.just("release"), st.integers(0, 4)),
        st.tuples(st.just("leaves"), st.integers(0, 6)),
    ),
    max_size=30,
)


@PROTOCOLS
@given(moves=Moves)
def test_no_client_ever_changes_and_no_release_harms_another(protocol: int, moves: list[tuple[Any, ...]]) -> None:
    gpu = Gpu(protocol)
    gpu.start(SERVING)
    first = gpu.client(SERVING).server
    began = {SERVING: (gpu.client(SERVING).percent, gpu.client(SERVING).memory, gpu.client(SERVING).priority)}
    for what, *how in moves:
        match what:
            case "guest" if how[0] not in gpu.living:
                limits = GuestLimits(share=how[1])
                kept = partitioner(gpu, limits)
                told = re.search(r"at most ([\d.]+) %", kept.describe().binds)
                client = gpu.start(how[0], kept.guest_env())
                assert isinstance(client, Client)
                assert told is not None
                assert f"{client.percent:g}" == told[1]
                assert client.percent <= (mps_words.percentage(limits) or 100)
                assert (client.priority, client.server) == (1, first)
                began[how[0]] = (client.percent, client.memory, client.priority)
            case "serving" if how[0] not in gpu.living:
                client = gpu.start(how[0])
                assert isinstance(client, Client)
                assert (client.priority, client.memory) == (0, None)
                began[how[0]] = (client.percent, client.memory, client.priority)
            case "server" if protocol == 2:
                gpu.fake.run((), f"set_active_thread_percentage {first} {how[0]}")
            case "default" if protocol == 2:
                gpu.fake.run((), f"set_default_active_thread_percentage {how[0]}")
            case "release":
                release(gpu.daemon(), how)
                gpu.kill(how[0])
                began.pop(how[0], None)
            case "leaves" if how[0] in gpu.living:
                gpu.fake.leave(how[0])
                gpu.living.discard(how[0])
                began.pop(how[0], None)
        now = {pid: (one.percent, one.memory, one.priority) for pid, one in gpu.fake.clients.items()}
        assert now == began
        assert all(gpu.fake.works(pid) for pid in began)
