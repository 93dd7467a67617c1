"""What is relied on of MPS, with real processes: against the stand-in everywhere, against NVIDIA's own on a GPU.

The tests marked `gpu` have never run: no GPU was at hand when they were written.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mps_site import HERE, MpsSite, Working, mps_site
from process_tools import DEADLINE_S, lives, until

from rose.errors import ClusterError
from rose.processes import family
from rose_executor import mps_daemon
from rose_executor.launcher import Command, SpawnLauncher
from rose_executor.mps_daemon import asking
from rose_executor.mps_preflight import compute_modes, find_daemon, serving_client
from rose_executor.mps_words import PIPE_DIRECTORY
from rose_executor.partition_mps import NO_DAEMON, MpsPartitioner
from rose_executor.partition_terms import GuestLimits
from rose_executor.partition_threads import ThreadPartitioner

HALF = GuestLimits(share=0.5)


@pytest.fixture(
    params=[
        pytest.param(("fake", 2), id="fake-v2"),
        pytest.param(("fake", 3), id="fake-v3"),
        pytest.param(("real", 2), id="real-v2", marks=pytest.mark.gpu),
        pytest.param(("real", 3), id="real-v3", marks=pytest.mark.gpu),
    ]
)
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MpsSite]:
    with mps_site(*request.param, monkeypatch) as found:
        yield found


def beside(serving: Working) -> MpsPartitioner:
    return MpsPartitioner(ThreadPartitioner([], ""), find_daemon(), HALF, lambda: [serving.pid], compute_modes())


def test_the_daemon_is_recognised_with_its_clients(site: MpsSite) -> None:
    daemon = find_daemon()
    assert (daemon.version, daemon.directory) == (site.protocol, site.directory)
    serving = site.start("serving")
    outside = site.start("outside", {PIPE_DIRECTORY: NO_DAEMON})
    client = serving_client(daemon, [serving.pid])
    assert client is not None
    assert client.pid == serving.pid
    with pytest.raises(ClusterError, match="is no client"):
        serving_client(daemon, [outside.pid])
    assert all(one.uid in (None, os.geteuid()) for one in daemon.servers())


def test_a_guest_is_a_client_of_servings_server_and_leaves_before_it_is_killed(site: MpsSite) -> None:
    serving = site.start("serving")
    partitioner = beside(serving)
    guest = site.start("guest", partitioner.guest_env())
    daemon = find_daemon()
    ours = serving_client(daemon, [serving.pid])
    theirs = serving_client(daemon, [guest.pid])
    assert ours is not None
    assert theirs is not None
    assert ours.server == theirs.server
    partitioner.release(guest.pid)
    guest.kill()
    serving.goes_on()
    site.start("next", partitioner.guest_env()).goes_on()
    partitioner.release(guest.pid)  # long gone


@pytest.mark.parametrize("how", [(), ("frozen",)])
def test_a_killed_executor_takes_its_guest_along_and_leaves_serving_whole(
    site: MpsSite, how: tuple[str, ...], tmp_path: Path
) -> None:
    serving = site.start("serving")
    owner = site.run(str(HERE / "mps_owner_main.py"), str(tmp_path), str(serving.pid), site.module, *how)
    until((tmp_path / "placed").exists, "no guest starts")
    guard = int((tmp_path / "placed").read_text())
    program = int((tmp_path / "guest").read_text().split()[0])
    members = {program, *(one.pid for one in family(guard))}
    serving.goes_on()
    owner.send_signal(signal.SIGKILL)
    until(lambda: not any(lives(pid) for pid in members), "something of the guest outlived its executor")
    assert program not in {client.pid for client in find_daemon().clients()}
    serving.goes_on()


def test_what_a_crashed_guest_leaves_computing_is_released_before_its_guards_kill_it(
    site: MpsSite, tmp_path: Path
) -> None:
    serving = site.start("serving")
    env = beside(serving).guest_env()
    client = str(HERE / f"{site.module}.py")

    async def run() -> int:
        path = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        arguments = (client, str(tmp_path / "guest"), str(tmp_path / "parent"))
        command = Command("mps_parent_main", arguments, tmp_path / "log", tmp_path, {**env, **path})
        child = await SpawnLauncher().launch(command)
        while not (tmp_path / "guest").exists() or not (tmp_path / "guest").read_text():
            await asyncio.sleep(0.02)
        os.kill(int((tmp_path / "parent").read_text()), signal.SIGKILL)
        return await asyncio.wait_for(child.wait(), DEADLINE_S)

    assert asyncio.run(run()) == -signal.SIGKILL
    assert not lives(int((tmp_path / "guest").read_text().split()[0]))
    serving.goes_on()


def test_a_daemon_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps_daemon, "_ANSWER_TIMEOUT_S", 0.3)
    with mps_site("fake", 2, monkeypatch) as site:
        (site.directory / "hang").touch()
        with pytest.raises(ClusterError, match="does not answer within") as refused:
            find_daemon()
    assert "end the daemon and start it again" in refused.value.to_do


def test_a_tool_without_a_daemon_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with mps_site("fake", 2, monkeypatch) as site:
        (site.directory / "state.json").unlink()
        with pytest.raises(ClusterError, match="Cannot find MPS control daemon process"):
            find_daemon()
        monkeypatch.setenv("PATH", str(site.directory))
        with pytest.raises(ClusterError, match="nvidia-cuda-mps-control cannot be run"):
            asking(site.directory)((), "")
        assert compute_modes() == []


def test_compute_modes_are_those_of_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    with mps_site("fake", 2, monkeypatch) as site:
        smi = site.directory.parent / "bin" / "nvidia-smi"
        smi.write_text(
            '#!/bin/sh\n[ "$1 $2" = "-i 1" ] && echo Exclusive_Process || printf "Default\\nProhibited\\n"\n'
        )
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert compute_modes() == ["Default", "Prohibited"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert compute_modes() == ["Exclusive_Process"]
