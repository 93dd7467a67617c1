"""NVIDIA's MPS control daemon as its documents describe it, for machines without a GPU: both languages, pure.

What it keeps (docs.nvidia.com/deploy/mps: "Legacy MPS v2 Interface", "MPS v3 Interface", "MPS v3 Namespaces",
"Appendix: Environment Variables", "Architecture", "Client Early Termination")
- v2: one server a user; another user's client waits until the clients of the server that is there are gone.
- Default limits count for the next server, a server's limits for its later clients; a client that runs keeps what it
  has. A client's own environment can only be tighter.
- v3: named servers; a namespace's percentage takes the place of the client's, its memory limit is one more bound, its
  priority counts where the client says nothing. A namespace is chosen by the directory that a client connects through.
- A client that is killed without having been terminated leaves its server, and all its clients, in a fault: the worst
  that "undefined state" may mean. It recovers when all of them are gone.
- What is not documented is answered with words that no parser may take for success, with code 0 in the shell of v2.

Standard library alone: the program on PATH starts it without any package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_NAME = re.compile(r"[a-z0-9_]{1,64}")
_SIZE = re.compile(r"(\d+)([GM])B?")
Answer = tuple[int, str, str]


class Refusal(Exception):
    """What the daemon says instead."""


@dataclass
class Limits:
    """Of a server in v2, of a namespace in v3; memory in MiB, of device 0."""

    percent: float | None = None
    memory: int | None = None
    priority: int = 0


@dataclass
class Client:
    pid: int
    server: str
    namespace: str
    percent: float
    memory: int | None
    priority: int
    terminated: bool = False
    command: str = "program"


@dataclass
class Server:
    name: str
    pid: int
    uid: int
    status: str = "ACTIVE"
    namespaces: dict[str, Limits] = field(default_factory=lambda: {"default": Limits()})


class FakeMps:
    """One daemon of `protocol` 2 or 3, its pipes in `root`. `alive` says whether a process is there."""

    def __init__(self, protocol: int, root: str, alive: Callable[[int], bool]) -> None:
        self.protocol = protocol
        self.root = PurePosixPath(root)
        self.alive = alive
        self.defaults = Limits(percent=100.0)
        self.servers: dict[str, Server] = {}
        self.clients: dict[int, Client] = {}
        self.next_pid = 4_200_000  # beyond what a kernel gives

    def state(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "root": str(self.root),
            "defaults": asdict(self.defaults),
            "servers": [asdict(one) for one in self.servers.values()],
            "clients": [asdict(one) for one in self.clients.values()],
            "next_pid": self.next_pid,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], alive: Callable[[int], bool]) -> FakeMps:
        fake = cls(state["protocol"], state["root"], alive)
        fake.defaults = Limits(**state["defaults"])
        for words in state["servers"]:
            spaces = {name: Limits(**limits) for name, limits in words["namespaces"].items()}
            fake.servers[words["name"]] = Server(**{**words, "namespaces": spaces})
        fake.clients = {words["pid"]: Client(**words) for words in state["clients"]}
        fake.next_pid = state["next_pid"]
        return fake

    # What happens to processes.

    def look(self) -> None:
        """See who is gone: called before anything else."""
        for client in [one for one in self.clients.values() if not self.alive(one.pid)]:
            del self.clients[client.pid]
            if not client.terminated and client.server in self.servers:
                self.servers[client.server].status = "FAULT"
        for server in self.servers.values():
            if not self._of(server):
                server.status = "ACTIVE"

    def leave(self, pid: int) -> None:
        """A client ends of itself, its work done."""
        self.look()
        self.clients.pop(pid, None)

    def connect(self, pid: int, uid: int, environ: Mapping[str, str], command: str = "program") -> Client | str:
        """CUDA starts in a process. Or why it is no client: "outside", "waits" or "not ready"."""
        self.look()
        place = PurePosixPath(environ.get(DIRECTORY, str(self.root)))
        if place != self.root and (self.protocol == 2 or self.root not in place.parents):
            return "outside"
        path = place.relative_to(self.root).parts
        server = self._server_for(uid) if not path else self.servers.get(path[0])
        if server is None:
            return "waits" if not path else "outside"
        namespace = path[1] if len(path) > 1 else "default"
        if namespace not in server.namespaces:
            return "outside"
        if server.status != "ACTIVE":
            return "not ready"
        client = self._client(pid, server, namespace, environ, command)
        self.clients[pid] = client
        return client

    def works(self, pid: int) -> bool:
        """Whether a client still gets an answer from the GPU."""
        self.look()
        client = self.clients[pid]
        return not client.terminated and self.servers[client.server].status == "ACTIVE"

    def _client(self, pid: int, server: Server, namespace: str, environ: Mapping[str, str], command: str) -> Client:
        limits = server.namespaces[namespace]
        own = float(environ.get(PERCENTAGE, 100))
        bounds = [one for one in (limits.memory, _memory_of(environ.get(MEMORY, ""))) if one is not None]
        if self.protocol == 2:
            percent = min(own, limits.percent or 100.0)
            priority = int(environ.get(PRIORITY, self.defaults.priority))
        else:
            percent = own if limits.percent is None else limits.percent
            priority = int(environ.get(PRIORITY, limits.priority))
        memory = min(bounds) if bounds else None
        return Client(pid, server.name, namespace, percent, memory, priority, command=command)

    def _server_for(self, uid: int) -> Server | None:
        if self.protocol == 3:
            return self.servers.get(f"uid_{uid}") or self._start(uid, f"uid_{uid}")
        for server in list(self.servers.values()):
            if server.uid == uid:
                return server
            if self._of(server):
                return None
            del self.servers[server.name]
        return self._start(uid)

    def _start(self, uid: int, name: str = "") -> Server:
        self.next_pid += 1
        server = Server(name or str(self.next_pid), self.next_pid, uid)
        if self.protocol == 2:
            server.namespaces["default"] = Limits(self.defaults.percent, self.defaults.memory)
        self.servers[server.name] = server
        return server

    def _of(self, server: Server) -> list[Client]:
        return [one for one in self.clients.values() if one.server == server.name]

    # What is asked of it.

    def run(self, arguments: Sequence[str], text: str) -> Answer:
        """The tool, run once."""
        self.look()
        try:
            if self.protocol == 3:
                return (0, self._verb(list(arguments)), "") if arguments else (1, "", "usage: module verb\n")
            if arguments:  # no shell command among them, and standard input is empty
                return 0, "", ""
            return 0, "".join(self._shell(line.split()) for line in text.splitlines() if line.strip()), ""
        except Refusal as refusal:
            return (1, "", f"{refusal}\n") if self.protocol == 3 else (0, f"{refusal}\n", "")

    def _shell(self, words: list[str]) -> str:
        command, *rest = words
        match command, rest:
            case "get_server_list", []:
                return "".join(f"{name}\n" for name in self.servers)
            case "get_server_status", [server]:
                return f"{self._named(server).status}\n"
            case "start_server", ["-uid", uid]:
                self._start(int(uid))
                return ""
            case "get_client_list", [server]:
                return "".join(f"{one.pid}\n" for one in self._of(self._named(server)))
            case "ps", ([] | ["-p", _]):
                return self._ps(rest[1] if rest else None)
            case "get_default_active_thread_percentage", []:
                return f"{self.defaults.percent:.1f}\n"
            case "set_default_active_thread_percentage", [percent]:
                self.defaults.percent = _percent(percent)
                return f"{self.defaults.percent:.1f}\n"
            case "get_active_thread_percentage", [server]:
                return f"{self._v2(server).percent:.1f}\n"
            case "set_active_thread_percentage", [server, percent]:
                self._v2(server).percent = _percent(percent)
                return f"{self._v2(server).percent:.1f}\n"
            case "set_default_device_pinned_mem_limit", ["0", size]:
                self.defaults.memory = _size(size)
                return ""
            case "set_device_pinned_mem_limit", [server, "0", size]:
                self._v2(server).memory = _size(size)
                return ""
            case "get_default_client_priority", []:
                return f"{self.defaults.priority}\n"
            case "set_default_client_priority", [priority]:
                self.defaults.priority = _priority(priority)
                return ""
            case "terminate_client", [server, pid]:
                return self._terminated(self._named(server), pid)
            case "lspart", []:
                return "GPU PARTITION FREE_CHUNK USED_CHUNK FREE_SM USED_SM CLIENTS\n"
        raise Refusal(f"Unrecognized command {' '.join(words)}")

    def _verb(self, words: list[str]) -> str:
        flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
        named = [word for word in words if not word.startswith("--")]
        bare = {word for word in words if word.startswith("--") and "=" not in word}
        match named:
            case ["server", "create", *name] if len(name) < 2 and (name or "uid" in flags):
                uid = int(flags.get("uid", 0))
                self._start(uid, _new(name[0] if name else f"uid_{uid}", self.servers))
                return ""
            case ["server", "list"]:
                rows = [
                    (s.name, s.uid, s.pid, self._ready(s), self.root / s.name, "all", "-")
                    for s in self.servers.values()
                ]
                return _table("name,uid,pid,status,pipe-directory,allowed-devices,context-ids", rows, flags)
            case ["server", "delete", name]:
                if self._of(self._named(name)) and "--force" not in bare:
                    raise Refusal(f"server '{name}' has active clients")
                del self.servers[name]
                return ""
            case ["namespace", "create", name]:
                spaces = self._named(flags.get("server", "")).namespaces
                spaces[_new(name, spaces)] = Limits()
                return ""
            case ["namespace", "set", name]:
                _set(self._space(name, flags.pop("server", "")), flags)
                return ""
            case ["namespace", "get", name, server, "pipe-directory"]:
                self._space(name, server)
                return f"{self.root / server / name}\n"
            case ["namespace", "list"]:
                server = self._named(flags.get("server", ""))
                rows = [
                    (
                        name,
                        server.name,
                        self._ready(server),
                        one.memory,
                        one.percent,
                        one.priority,
                        self.root / server.name / name,
                    )
                    for name, one in server.namespaces.items()
                ]
                limits = "pinned-memory-limit,active-thread-percentage,client-priority"
                return _table(f"name,server,server-status,{limits},pipe-directory", rows, flags)
            case ["namespace", "delete", name]:
                server = self._named(flags.get("server", ""))
                self._space(name, server.name)
                if any(one.namespace == name for one in self._of(server)) and "--force" not in bare:
                    raise Refusal(f"namespace '{name}' has active clients")
                del server.namespaces[name]
                return ""
            case ["client", "list"]:
                found = [one for one in self.clients.values() if "--all" in bare or one.server == flags.get("server")]
                rows = [(one.pid, one.server, 0, one.namespace, one.command) for one in found if not one.terminated]
                return _table("pid,server,device,namespace,cmd", rows, flags)
            case ["client", "terminate", pid]:
                client = self.clients.get(int(pid))
                if client is None:
                    raise Refusal(f"no client with PID {pid}")
                client.terminated = True
                return ""
        raise Refusal(f"unknown command: {' '.join(words)}")

    def _ps(self, server: str | None) -> str:
        rows = [one for one in self.clients.values() if server in (None, one.server) and not one.terminated]
        lines = [f"{one.pid} 0 {one.server} GPU-cb1213a3-d6a4-be7f 4026531836 {one.command}\n" for one in rows]
        return "PID ID SERVER DEVICE NAMESPACE COMMAND\n" + "".join(lines)

    def _terminated(self, server: Server, pid: str) -> str:
        client = self.clients.get(int(pid))
        if client is None or client.server != server.name:
            return "1\n"  # a CUDA error
        client.terminated = True
        return "0\n"

    def _named(self, server: str) -> Server:
        if server not in self.servers:
            raise Refusal(f"Server {server} is not valid")
        return self.servers[server]

    def _v2(self, server: str) -> Limits:
        return self._named(server).namespaces["default"]

    def _space(self, name: str, server: str) -> Limits:
        spaces = self._named(server).namespaces
        if name not in spaces:
            raise Refusal(f"no namespace '{name}' on server '{server}'")
        return spaces[name]

    @staticmethod
    def _ready(server: Server) -> str:
        return "Ready" if server.status == "ACTIVE" else "Fault"


def _new(name: str, among: Mapping[str, Any]) -> str:
    if _NAME.fullmatch(name) is None or name in among:
        raise Refusal(f"name '{name}' cannot be used")
    return name


def _set(limits: Limits, flags: Mapping[str, str]) -> None:
    if not flags:
        raise Refusal("at least one option is required")
    for name, value in flags.items():
        match name:
            case "active-thread-percentage":
                limits.percent = _percent(value)
            case "pinned-memory-limit":
                limits.memory = _size(value)
            case "client-priority":
                limits.priority = _priority(value)
            case _:
                raise Refusal(f"unknown option --{name}")


def _percent(text: str) -> float:
    try:
        percent = float(text)
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise Refusal(f"percentage {text} is not valid")
    return percent


def _priority(text: str) -> int:
    if text not in ("0", "1"):
        raise Refusal(f"priority {text} is not valid")
    return int(text)


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise Refusal(f"limit {text} is not valid")
    return int(found[1]) * (1024 if found[2] == "G" else 1)


def _memory_of(text: str) -> int | None:
    limits = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    return _size(limits["0"]) if "0" in limits else None


def _table(head: str, rows: Sequence[tuple[object, ...]], flags: Mapping[str, str]) -> str:
    shape = flags.get("format", "table").split(",")
    comma = "," if shape[0] == "csv" else " "
    lines = [] if "noheader" in shape else [head.replace(",", comma)]
    lines += [comma.join("-" if cell is None else str(cell) for cell in row) for row in rows]
    return "".join(f"{line}\n" for line in lines)
