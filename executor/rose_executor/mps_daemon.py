"""One MPS control daemon, v2 or v3, behind one interface: who its clients are, what a guest is given, how one is ended.

Invariants
- Every question has a deadline, and an answer that is not the documented one is an error, never a guess.
- The serving engine's settings are not touched: neither its server's limits nor its namespace.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rose.errors import ClusterError
from rose_executor import mps_words
from rose_executor.mps_words import PIPE_DIRECTORY, MpsClient, MpsServer
from rose_executor.partition_terms import GuestLimits

TOOL = "nvidia-cuda-mps-control"
_ANSWER_TIMEOUT_S = 5.0
_NAMESPACE_PREFIX = "rose_"
_NAMESPACE = re.compile(rf"{_NAMESPACE_PREFIX}(\d+)_[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the tool has said."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        return (self.out.strip() or self.err.strip() or f"code {self.code}")[:300]


Ask = Callable[[Sequence[str], str], Answer]
"""Runs the tool with arguments and a standard input. Raises ClusterError if it is not there or does not answer."""


def asking(directory: Path) -> Ask:
    """The tool, for the daemon whose pipes lie in `directory`."""

    def ask(arguments: Sequence[str], text: str) -> Answer:
        try:
            ended = subprocess.run(
                [TOOL, *arguments],
                input=text,
                capture_output=True,
                text=True,
                timeout=_ANSWER_TIMEOUT_S,
                check=False,
                env={**os.environ, PIPE_DIRECTORY: str(directory)},
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"the MPS control daemon of {directory} does not answer within {_ANSWER_TIMEOUT_S:g} s",
                to_do="see control.log in CUDA_MPS_LOG_DIRECTORY; end the daemon and start it again",
            ) from None
        except OSError as error:
            raise ClusterError(f"{TOOL} cannot be run: {error.strerror}", to_do="install it with the driver") from error
        return Answer(ended.returncode, ended.stdout, ended.stderr)

    return ask


class MpsDaemon(Protocol):
    """`version` of its interface; `directory` that the daemon itself is reached by."""

    version: int
    directory: Path

    def servers(self) -> list[MpsServer]: ...

    def clients(self) -> list[MpsClient]: ...

    def guest_env(self, limits: GuestLimits, server: str | None, gpus: int) -> Mapping[str, str | None]:
        """What a guest on `server` is to be started with; None: on the one that its user has."""
        ...

    def ceiling(self, limits: GuestLimits, server: str | None) -> float:
        """The percentage that binds a guest which starts now: the tightest of all that count."""
        ...

    def terminate(self, client: MpsClient) -> None:
        """End what a client has on the GPU; it may be killed afterwards. Raises ClusterError if that failed."""
        ...

    def close(self) -> None:
        """Take back what was made for guests."""
        ...


class MpsV2:
    """The shell: commands on standard input."""

    version = 2

    def __init__(self, directory: Path, ask: Ask) -> None:
        self.directory = directory
        self._ask = ask

    def servers(self) -> list[MpsServer]:
        found = mps_words.pids(self._shell("get_server_list"))
        return [MpsServer(str(pid), _uid_of(pid), self._shell(f"get_server_status {pid}").strip()) for pid in found]

    def clients(self) -> list[MpsClient]:
        return mps_words.clients_of_ps(self._shell("ps"))

    def guest_env(self, limits: GuestLimits, server: str | None, gpus: int) -> Mapping[str, str | None]:
        return mps_words.client_env(limits, str(self.directory), gpus)

    def ceiling(self, limits: GuestLimits, server: str | None) -> float:
        command = "get_default_active_thread_percentage"
        if server is not None:
            command = f"get_active_thread_percentage {server}"
        return min(mps_words.percentage(limits) or 100, mps_words.ceiling(self._shell(command)))

    def terminate(self, client: MpsClient) -> None:
        answer = self._shell(f"terminate_client {client.server} {client.pid}")
        if answer.strip() != "0":
            raise _not_ended(client, answer)

    def close(self) -> None:
        """A guest's limits were in its environment alone."""

    def _shell(self, command: str) -> str:
        answer = self._ask((), f"{command}\n")
        if answer.code != 0:
            raise _refused(command, answer)
        return answer.out


class MpsV3:
    """Modules and verbs as arguments; a namespace of this process for its guests, renewed at each start of one."""

    version = 3

    def __init__(self, directory: Path, ask: Ask) -> None:
        self.directory = directory
        self._ask = ask
        # Limits of a namespace can be changed, but not taken away: nobody else's before may be found in it.
        self._namespace = f"{_NAMESPACE_PREFIX}{os.getpid()}_{secrets.token_hex(4)}"
        self._server: str | None = None

    def servers(self) -> list[MpsServer]:
        return mps_words.servers_of_list(self._told("server", "list", "--format=csv,noheader"))

    def clients(self) -> list[MpsClient]:
        return mps_words.clients_of_list(self._told("client", "list", "--all", "--format=csv,noheader"))

    def guest_env(self, limits: GuestLimits, server: str | None, gpus: int) -> Mapping[str, str | None]:
        name = self._server_for(server)
        if self._server not in (None, name):
            self.close()
        self._server = name
        if self._namespace not in self._namespaces(name):
            self._told("namespace", "create", self._namespace, f"--server={name}")
        self._told("namespace", "set", self._namespace, f"--server={name}", *mps_words.namespace_flags(limits))
        return mps_words.namespace_env(self._told("namespace", "get", self._namespace, name, "pipe-directory").strip())

    def ceiling(self, limits: GuestLimits, server: str | None) -> float:
        return mps_words.percentage(limits) or 100

    def terminate(self, client: MpsClient) -> None:
        answer = self._ask(("client", "terminate", str(client.pid)), "")
        if answer.code != 0:
            raise _not_ended(client, answer.words)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # Refused while a guest is still in it, and void if the server is gone.
            with contextlib.suppress(ClusterError):
                self._told("namespace", "delete", self._namespace, f"--server={server}")

    def _server_for(self, server: str | None) -> str:
        """That one, or the one by which the daemon serves this user's programs; it is made if it is not there."""
        if server is not None:
            return server
        name = f"uid_{os.geteuid()}"
        if name not in {one.name for one in self.servers()}:
            self._told("server", "create", f"--uid={os.geteuid()}")
        return name

    def _namespaces(self, server: str) -> list[str]:
        """Those of a server, without the ones that executors left which are gone."""
        names = mps_words.names_of_list(self._told("namespace", "list", f"--server={server}", "--format=csv,noheader"))
        for name in names:
            ours = _NAMESPACE.fullmatch(name)
            if ours is not None and not Path(f"/proc/{ours[1]}").exists():
                with contextlib.suppress(ClusterError):
                    self._told("namespace", "delete", name, f"--server={server}")
        return names

    def _told(self, *arguments: str) -> str:
        answer = self._ask(arguments, "")
        if answer.code != 0:
            raise _refused(" ".join(arguments), answer)
        return answer.out


def recognised(directory: Path, ask: Ask) -> MpsDaemon:
    """The daemon in `directory`. Raises ClusterError if none answers in either language.

    A v3 tool follows the daemon's language, and an older one leaves its arguments alone and finds no command to read.
    """
    answer = ask(("server", "list", "--format=csv"), "")
    if answer.code == 0 and "pipe-directory" in answer.out.lower():
        return MpsV3(directory, ask)
    answer = ask((), "get_server_list\n")
    if answer.code == 0 and all(word.isdecimal() for word in answer.out.split()):
        return MpsV2(directory, ask)
    raise ClusterError(
        f"no MPS control daemon answers in {directory}: {answer.words}",
        expected="a daemon with interface v2 or v3",
        to_do=f"start it: {PIPE_DIRECTORY}={directory} {TOOL} -d",
    )


def _uid_of(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _refused(command: str, answer: Answer) -> ClusterError:
    return ClusterError(
        f"the MPS control daemon refuses `{command}`: {answer.words}",
        to_do="see control.log in CUDA_MPS_LOG_DIRECTORY",
    )


def _not_ended(client: MpsClient, why: str) -> ClusterError:
    return ClusterError(
        f"MPS client {client.pid} of server {client.server} could not be terminated: {why.strip()[:200]}",
        to_do="if other clients of that server fail, restart the server and all of them",
    )
