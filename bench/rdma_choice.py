"""NIXL against Mooncake, for the transport inside a cluster: one-sided reads between two processes of one machine.

Where there is no RDMA card both fall back to TCP, and NIXL to shared memory as well; the figures say what each library
costs on top of the path below it and how it fails, not how fast a card is. In a run each side gets a fresh pair of
processes, a *holder* with 64 MiB of registered memory and a *reader*; its figure is the median over the reads, in GB/s
of wall clock, after one read that connects. `socket` is the same copy over one plain TCP connection.

`*_s_to_fail` is how long after its holder was killed, in the middle of a read, a reader sees an error; null if it had
not within 20 s, or its process went down. Needs the packages nixl-cu12 and mooncake-transfer-engine-non-cuda (and for
the latter the system's libibverbs and librdmacm); a side whose library cannot be imported is left out.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from statistics import median
from typing import IO, Any

from bench.registry import Bench, BenchFailed
from bench.result import Run

REGION_BYTES = 64 * 2**20
SIZES = {"64mib": (REGION_BYTES, 6), "1mib": (2**20, 40)}
"""Bytes and reads by the name in the figure."""
FAIL_S = 20.0
_PATIENCE_S = 60.0
_INTO_READS_S = 0.2
_POLL_S = 5e-5
_PATTERN = bytes(range(251))


class Side(ABC):
    """One library on one path; made in the process that uses it, with its registered memory."""

    def __init__(self) -> None:
        self.region = mmap.mmap(-1, REGION_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.region))

    @abstractmethod
    def told(self) -> dict[str, Any]:
        """What a reader must be told to reach this holder."""

    @abstractmethod
    def meet(self, told: dict[str, Any]) -> None: ...

    @abstractmethod
    def read(self, size_bytes: int) -> None:
        """Read the holder's first bytes into ours. Raises OSError."""


class NixlSide(Side):
    def __init__(self, transports: str) -> None:
        super().__init__()
        os.environ["UCX_TLS"] = transports
        api = importlib.import_module("nixl_cu12._api")
        self._name = f"side-{os.getpid()}"
        self._agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(self.address, REGION_BYTES, 0, "")], "DRAM")

    def told(self) -> dict[str, Any]:
        return {"metadata": self._agent.get_agent_metadata().hex(), "name": self._name, "address": self.address}

    def meet(self, told: dict[str, Any]) -> None:
        self._agent.add_remote_agent(bytes.fromhex(told["metadata"]))
        self._holder, self._at = told["name"], told["address"]

    def read(self, size_bytes: int) -> None:
        mine = self._agent.get_xfer_descs([(self.address, size_bytes, 0)], "DRAM")
        theirs = self._agent.get_xfer_descs([(self._at, size_bytes, 0)], "DRAM")
        try:
            handle = self._agent.initialize_xfer("READ", mine, theirs, self._holder)
            state = self._agent.transfer(handle)
            while state == "PROC":
                # Not in a tight loop: on a machine of few cores that keeps the holder from its work.
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise OSError(str(error)) from error
        if state != "DONE":
            raise OSError(state)


class MooncakeSide(Side):
    def __init__(self) -> None:
        super().__init__()
        os.environ["MC_FORCE_TCP"] = "1"
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if self._engine.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", "tcp", ""):
            raise OSError("Mooncake does not start")
        if self._engine.register_memory(self.address, REGION_BYTES):
            raise OSError("Mooncake does not register memory")

    def told(self) -> dict[str, Any]:
        return {"name": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self.address}

    def meet(self, told: dict[str, Any]) -> None:
        self._holder, self._at = told["name"], told["address"]

    def read(self, size_bytes: int) -> None:
        if self._engine.transfer_sync_read(self._holder, self.address, self._at, size_bytes):
            raise OSError("the read failed")


class SocketSide(Side):
    def __init__(self) -> None:
        super().__init__()
        self._listener = socket.create_server(("127.0.0.1", 0))

    def told(self) -> dict[str, Any]:
        if os.fork() == 0:
            connection, _ = self._listener.accept()
            while asked := connection.recv(8, socket.MSG_WAITALL):
                connection.sendall(memoryview(self.region)[: int.from_bytes(asked, "little")])
            os._exit(0)
        return {"port": self._listener.getsockname()[1]}

    def meet(self, told: dict[str, Any]) -> None:
        self._connection = socket.create_connection(("127.0.0.1", told["port"]))

    def read(self, size_bytes: int) -> None:
        self._connection.sendall(size_bytes.to_bytes(8, "little"))
        at = 0
        with memoryview(self.region) as room:
            while at < size_bytes:
                came = self._connection.recv_into(room[at:size_bytes])
                if not came:
                    raise OSError("closed")
                at += came


SIDES: dict[str, tuple[Callable[[], Side], str]] = {
    "nixl_tcp": (lambda: NixlSide("tcp"), "nixl_cu12"),
    "nixl_shm": (lambda: NixlSide("shm,cma,tcp"), "nixl_cu12"),
    "mooncake_tcp": (MooncakeSide, "mooncake.engine"),
    "socket": (SocketSide, "socket"),
}


def measure(arguments: Namespace, index: int) -> Run:
    """One run: each side in turn. Raises BenchFailed if a side reads other bytes than are held."""
    out = left_out(arguments)
    figures: dict[str, float | None] = {}
    for name in SIDES:
        if f"{name}_gb_s_64mib" not in out:
            figures |= _pair(name)
    return figures


def _pair(name: str) -> dict[str, float | None]:
    holder, reader = _start("hold", name), _start("read", name)
    try:
        told = _line(holder)
        _say(reader, told)
        figures: dict[str, float | None] = dict(_line(reader))
        if name != "socket":
            figures[f"{name}_s_to_fail"] = _fails_after(holder, reader)
        return figures
    finally:
        for process in (reader, holder):
            process.kill()
            process.wait(_PATIENCE_S)


def _fails_after(holder: subprocess.Popen[str], reader: subprocess.Popen[str]) -> float | None:
    _say(reader, {})
    _line(reader)
    time.sleep(_INTO_READS_S)
    patience = threading.Timer(FAIL_S, reader.kill)
    patience.start()
    killed_s = time.time()
    holder.kill()
    try:
        return float(_line(reader)["failed_s"]) - killed_s
    except BenchFailed:
        return None
    finally:
        patience.cancel()


def _start(role: str, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.rdma_choice", role, name]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _say(process: subprocess.Popen[str], what: dict[str, Any]) -> None:
    assert process.stdin is not None
    print(json.dumps(what), file=process.stdin, flush=True)


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next JSON line of a child; the libraries print lines of their own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            told: dict[str, Any] = json.loads(line)
            if "error" in told:
                raise BenchFailed(told["error"])
            return told
    raise BenchFailed(f"a process of the pair ended with {process.wait(_PATIENCE_S)}")


def child(role: str, name: str, orders: IO[str]) -> None:
    """Hold until killed, or read as told."""
    side = SIDES[name][0]()
    if role == "hold":
        side.region.write((_PATTERN * (REGION_BYTES // len(_PATTERN) + 1))[:REGION_BYTES])
        print(json.dumps(side.told()), flush=True)
        orders.read()
        return
    side.meet(json.loads(orders.readline()))
    print(json.dumps({f"{name}_{figure}": value for figure, value in _read_all(side).items()}), flush=True)
    orders.readline()
    print(json.dumps({"reading": True}), flush=True)
    print(json.dumps({"failed_s": _read_until_it_fails(side)}), flush=True)
    # Not by the libraries' own teardown, which may crash once the other side is gone.
    os._exit(0)


def _read_all(side: Side) -> dict[str, float]:
    side.read(REGION_BYTES)
    if side.region[:] != (_PATTERN * (REGION_BYTES // len(_PATTERN) + 1))[:REGION_BYTES]:
        print(json.dumps({"error": "other bytes came than are held"}), flush=True)
    figures = {}
    for name, (size_bytes, reads) in SIZES.items():
        seconds = []
        for _ in range(reads):
            begin = time.perf_counter()
            side.read(size_bytes)
            seconds.append(time.perf_counter() - begin)
        figures[f"gb_s_{name}"] = size_bytes / median(seconds) / 1e9
    return figures


def _read_until_it_fails(side: Side) -> float:
    while True:
        try:
            side.read(REGION_BYTES)
        except OSError:
            return time.time()


def add_arguments(parser: ArgumentParser) -> None:
    """None of its own."""


def left_out(arguments: Namespace) -> dict[str, str]:
    out: dict[str, str] = {}
    for name, (_, module) in SIDES.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            out |= dict.fromkeys(_figures(name), f"cannot be imported: {error}")
    return out


def _figures(name: str) -> tuple[str, ...]:
    speeds = tuple(f"{name}_gb_s_{size}" for size in SIZES)
    return speeds if name == "socket" else (*speeds, f"{name}_s_to_fail")


BENCH = Bench(
    name="rdma_choice",
    summary="NIXL against Mooncake: one-sided reads between two processes, and how a dead peer shows",
    headline=tuple(figure for name in SIDES for figure in _figures(name)),
    targets=(),
    measure=measure,
    add_arguments=add_arguments,
    left_out=left_out,
    runs=7,
)

if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], sys.stdin)
