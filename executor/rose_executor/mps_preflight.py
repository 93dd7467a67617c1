"""Can a guest be held by MPS here? Each thing that may be in the way, by name, before anything is started.

Invariants
- Nothing is changed: neither the daemon, nor compute modes, nor the serving engine.
- A user that cannot be seen from here is held against nobody. But clients that go by numbers of another pid namespace
  cannot be told apart, nor terminated: that is in the way.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from rose.errors import ClusterError
from rose.machine import MPS_DIRECTORIES, NVIDIA_SMI_TIMEOUT_S
from rose.processes import family
from rose_executor.mps_daemon import TOOL, Ask, MpsDaemon, asking, recognised
from rose_executor.mps_words import PIPE_DIRECTORY, MpsClient, MpsServer

EXCLUSIVE = "Exclusive_Process"
_PROHIBITED = "Prohibited"
_READY = ("ACTIVE", "INITIALIZING", "READY", "")
_MULTIUSER = ("-multiuser-server", "-m", "--multiuser")


def find_daemon(asks: Callable[[Path], Ask] = asking, directories: Sequence[Path] = MPS_DIRECTORIES) -> MpsDaemon:
    """The daemon that a guest of this process would be a client of. Raises ClusterError if there is none to be had."""
    if shutil.which(TOOL) is None:
        raise ClusterError(f"{TOOL} is not installed", to_do="install it with the driver, and start it with -d")
    directory = pipe_directory(directories)
    _check_directory(directory)
    return recognised(directory, asks(directory))


def pipe_directory(directories: Sequence[Path] = MPS_DIRECTORIES) -> Path:
    """What CUDA_MPS_PIPE_DIRECTORY says, else the first default in which a daemon has its pipes."""
    named = os.environ.get(PIPE_DIRECTORY)
    if named:
        return Path(named)
    return next((one for one in directories if (one / "control").exists()), directories[0])


def check_servers(daemon: MpsDaemon, uid: int) -> None:
    """Raises ClusterError if a guest of that user would wait for another user's programs, or for a broken server."""
    servers = daemon.servers()
    broken = [one for one in servers if one.status.upper() not in _READY]
    if broken:
        raise ClusterError(
            f"MPS server {broken[0].name} is {broken[0].status}",
            expected="a server that takes clients",
            to_do="end the clients of the GPU that failed; the server recovers when they are gone",
        )
    if daemon.version == 2 and not _shared_by_users(servers):
        others = [one for one in servers if one.uid not in (None, uid)]
        if others:
            raise ClusterError(
                f"MPS server {others[0].name} belongs to user {others[0].uid}, and a guest would be user {uid}",
                expected="one user for the serving engine and its guest: v2 gives each user its turn",
                to_do="run the executor as that user, or start the daemon with -multiuser-server",
            )


def serving_client(daemon: MpsDaemon, serving: Collection[int]) -> MpsClient | None:
    """The serving engine's process among the daemon's clients; None where no process of it is seen.

    Raises ClusterError if it computes without the daemon, or if that cannot be told.
    """
    if not serving:
        return None
    clients = daemon.clients()
    found = [client for client in clients if client.pid in serving]
    if not found and clients and not any(psutil.pid_exists(client.pid) for client in clients):
        raise ClusterError(
            f"the MPS daemon in {daemon.directory} names its clients by numbers of another pid namespace",
            expected="daemon, serving engine and executor in one: a guest is terminated by its number",
            to_do="start the executor where the daemon is; for a pod that is hostPID: true",
        )
    if not found:
        raise ClusterError(
            f"the serving engine (processes {sorted(serving)}) is no client of the MPS daemon in {daemon.directory}",
            expected="both engines as clients of one daemon: MPS binds nothing beside a process that is none",
            to_do=f"start the serving engine again with {PIPE_DIRECTORY}={daemon.directory}",
        )
    return found[0]


def compute_modes() -> list[str]:
    """The compute mode of each GPU that this process may use, in nvidia-smi's words; none where nobody says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    only = ["-i", visible] if visible else []
    try:
        answer = subprocess.run(
            ["nvidia-smi", *only, "--query-gpu=compute_mode", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def check_modes(modes: Iterable[str], why_no_mps: str) -> None:
    """Raises ClusterError if no guest can compute beside the serving engine; `why_no_mps` is "" where MPS is there."""
    taken = set(modes)
    if _PROHIBITED in taken:
        raise ClusterError(
            "the GPU's compute mode is Prohibited", to_do="nvidia-smi -c EXCLUSIVE_PROCESS, as its owner"
        )
    if EXCLUSIVE in taken and why_no_mps:
        raise ClusterError(
            f"the GPU's compute mode is {EXCLUSIVE} and {why_no_mps}: only one process may compute there",
            expected="an MPS daemon, with the serving engine as its client",
            to_do="mend that, or nvidia-smi -c DEFAULT, and both engines take turns",
        )


def writers(file: Path) -> frozenset[int]:
    """Processes other than this one that have a file open for writing, with all that they have started.

    Those that this process may not look into are left out.
    """
    file = file.resolve()
    found: set[int] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid() and _writes(process, file):
            found.update(one.pid for one in family(int(process.name)))
    return frozenset(found)


def _writes(process: Path, file: Path) -> bool:
    try:
        for handle in (process / "fd").iterdir():
            if os.readlink(handle) == str(file):
                flags = (process / "fdinfo" / handle.name).read_text("ascii").split("flags:")[1].split()[0]
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    except OSError:
        pass
    return False


def _check_directory(directory: Path) -> None:
    control = directory / "control"
    if not control.exists():
        raise ClusterError(
            f"no MPS control daemon has its pipes in {directory}",
            to_do=f"start it: {TOOL} -d, or set {PIPE_DIRECTORY} to where it has them",
        )
    if not os.access(directory, os.X_OK) or not os.access(control, os.W_OK):
        about = control.stat() if os.access(directory, os.X_OK) else directory.stat()
        raise ClusterError(
            f"{control} belongs to user {about.st_uid} (mode {stat.S_IMODE(about.st_mode):o}), this is user "
            f"{os.geteuid()}",
            expected="pipes that this user may write to",
            to_do="run the executor as the user of the daemon, or start a daemon with a directory of this user's",
        )


def _shared_by_users(servers: Collection[MpsServer]) -> bool:
    """Whether root's server takes everybody's programs."""
    return any(one.uid == 0 for one in servers) and any(
        argument in _MULTIUSER for line in _daemon_lines() for argument in line
    )


def _daemon_lines() -> Iterator[list[str]]:
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if line and Path(line[0]).name == TOOL:
            yield line
