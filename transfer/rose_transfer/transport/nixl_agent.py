"""NIXL, as much of it as is needed: memory that others may read, and reading theirs. Imported only when it is used.

Invariants
- Memory that a read writes to is not reused, freed or deregistered before NIXL says that the read is over. A read
  cannot be called back: `releaseXferReq` returns with the bytes still on their way (NIXL pull request 2044). So one
  that was given up is kept, with its memory, until it ends; then both go.
- A peer that a read failed on is forgotten and met anew, but only when no read from it is open: forgetting one in use
  crashes in UCX (NIXL pull request 1868).
- An agent is closed only after its last read, and is then of no more use. One that is dropped before that is left to
  the process, with the memory that is read into: never destroyed, not even at exit.
- In a process that was forked from the agent's it is of no use, and what it shares with the other one is left alone.
- An agent that nobody reads from sleeps.

Which path the reads take is UCX's to choose, or that of whoever sets UCX_TLS: an RDMA card, else shared memory, else
TCP. Over TCP, UCX 1.21 aborts the process of a lender whose reader died in the middle of a read. Peers that know the
token get keys that let them reach the lent memory, and no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import mmap
import os
import sys
import threading
import time
import uuid
import weakref
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rose.errors import ContractError, TransferError
from rose.machine import rdma_devices

_PACKAGES = ("nixl_cu12", "nixl_cu13")
_WAKES_EVERY_US = 10_000
_SEES_OUT_EVERY_S = 0.02
_CLASHING = "grpc_tools._protoc_compiler"


class ReadState(StrEnum):
    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Registered memory: `size_bytes` from `address`."""

    memory: mmap.mmap
    address: int
    size_bytes: int
    registration: Any


@dataclass(slots=True, eq=False)
class Read:
    """A posted read. Its handle is None once it is over."""

    peer: str
    handle: Any
    region: Region


class NixlAgent:
    """Reads what others lend, or, with `lends`, lends to them too. Safe from any thread; share it within a process.

    An agent that lends has a thread of NIXL's that serves its readers; it slows down the reads of the same agent, so a
    process that does both a lot is better off with two. It does not sleep while a peer that has begun to connect stands
    still, and costs a core until that goes on or ends.

    `reaches_far` says whether other hosts may read too: there is an RDMA card, or somebody has set UCX_TLS.

    Raises TransferError if the library is missing or does not start.
    """

    def __init__(self, *, lends: bool) -> None:
        api = _nixl()
        self.lends = lends
        self.reaches_far = bool(rdma_devices()) or "UCX_TLS" in os.environ
        self._name = f"rose-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._reads: dict[str, int] = {}
        self._broken: set[str] = set()
        self._given_up: list[Read] = []
        self._regions: set[Region] = set()
        self._agent: Any = None
        try:
            self._agent = _agent(api, self._name, lends=lends)
        except Exception as error:
            raise TransferError(
                f"NIXL does not start: {error}",
                to_do="see its log (UCX_TLS needs tcp beside shm: peers meet by it), or use TcpServer",
            ) from error
        _agents.add(self)

    def register(self, size_bytes: int) -> Region:
        """Fresh memory that reads may be made from and into. Raises TransferError."""
        memory = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with self._lock:
            agent = self._live()
            try:
                registration = agent.register_memory([(address, size_bytes, 0, "")], "DRAM")
            except Exception as error:
                raise TransferError(
                    f"{size_bytes} bytes cannot be registered: {error}", to_do="raise the limit of locked memory"
                ) from error
            region = Region(memory, address, size_bytes, registration)
            self._regions.add(region)
        return region

    def release(self, region: Region) -> None:
        """Nobody reads the region or into it any more, except what was given up."""
        with self._lock:
            if self._agent is None:
                return
            self._sweep()
            if all(read.region is not region for read in self._given_up):
                self._agent.deregister_memory(region.registration)
                self._regions.discard(region)

    def metadata(self) -> bytes:
        """What a peer needs to read what is registered now."""
        with self._lock:
            return bytes(self._live().get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Make a peer known. Returns its name. Raises TransferError if it is no NIXL peer that can be reached."""
        with self._lock:
            agent = self._live()
            try:
                peer = agent.add_remote_agent(metadata)
                name = peer.decode() if isinstance(peer, bytes) else str(peer)
                if name in self._broken and not self._reads.get(name):
                    agent.remove_remote_agent(name)
                    agent.add_remote_agent(metadata)
                    self._broken.discard(name)
            except Exception as error:
                raise TransferError(
                    f"the other side cannot be reached by NIXL: {error}",
                    expected="the same version of NIXL and a network that both have",
                    to_do="look at UCX_TLS and UCX_NET_DEVICES on both sides, or use TcpServer",
                ) from error
        return name

    def read(self, peer: str, address: int, size_bytes: int, into: Region) -> Read:
        """Begin to read `size_bytes` at the peer's `address`. Raises TransferError."""
        with self._lock:
            agent = self._live()
            try:
                mine = agent.get_xfer_descs([(into.address, size_bytes, 0)], "DRAM")
                theirs = agent.get_xfer_descs([(address, size_bytes, 0)], "DRAM")
                handle = agent.initialize_xfer("READ", mine, theirs, peer)
                try:
                    agent.transfer(handle)
                except BaseException:
                    agent.release_xfer_handle(handle)
                    raise
            except Exception as error:
                self._broken.add(peer)
                raise TransferError(f"a read cannot begin: {error}") from error
            self._reads[peer] = self._reads.get(peer, 0) + 1
        return Read(peer, handle, into)

    def state(self, read: Read) -> ReadState:
        """How a read stands. Asked no more once it is done or failed."""
        with self._lock:
            return self._state(read)

    def give_up(self, read: Read) -> None:
        """Wait no more for a read; its memory is the agent's until it is over."""
        with self._lock:
            if read.handle is None:
                return
            self._broken.add(read.peer)
            self._given_up.append(read)
            if len(self._given_up) == 1:
                of = weakref.ref(self)
                threading.Thread(target=_see_out, args=[of], name="reads given up", daemon=True).start()

    def swept(self) -> bool:
        """Take back what reads that were given up held, if they are over. Returns whether all are."""
        with self._lock:
            if self._agent is not None:
                self._sweep()
            return self._agent is None or not self._given_up

    def close(self) -> None:
        """Forget all peers and end the agent; not yet while a read is under way, given up or not."""
        with self._lock:
            if self._agent is None:
                return
            self._sweep()
            if any(self._reads.values()):
                return
            for peer in self._reads:
                self._agent.remove_remote_agent(peer)
            self._agent = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
            if self._agent is not None:
                self._leave()

    def forked(self) -> None:
        """In a process forked from this agent's: its threads and locks are not here, its sockets are the other's."""
        self._lock = threading.Lock()
        if self._agent is not None:
            self._leave()

    def _leave(self) -> None:
        for kept in (self._agent, *self._regions):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._agent = None

    def _live(self) -> Any:
        if self._agent is None:
            raise ContractError("the NIXL agent is closed, or of the process that this one was forked from")
        self._sweep()
        return self._agent

    def _state(self, read: Read) -> ReadState:
        if self._agent is None:
            return ReadState.FAILED
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception:  # noqa: BLE001
            state = "ERR"
        if state == "PROC":
            return ReadState.UNDER_WAY
        self._agent.release_xfer_handle(read.handle)
        read.handle = None
        self._reads[read.peer] -= 1
        if state == "DONE":
            return ReadState.DONE
        self._broken.add(read.peer)
        return ReadState.FAILED

    def _sweep(self) -> None:
        over = [read for read in self._given_up if self._state(read) is not ReadState.UNDER_WAY]
        for read in over:
            self._given_up.remove(read)
            if all(other.region is not read.region for other in self._given_up):
                self._agent.deregister_memory(read.region.registration)
                self._regions.discard(read.region)


def _see_out(agent: weakref.ref[NixlAgent]) -> None:
    """Ask for the agent's reads until all are over.

    A connection that one side has begun and then asks nothing of keeps the thread of the other side awake, at the cost
    of a core.
    """
    while (living := agent()) is not None and not living.swept():
        del living
        time.sleep(_SEES_OUT_EVERY_S)


_agents: weakref.WeakSet[NixlAgent] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for agent in tuple(_agents):
        agent.forked()


os.register_at_fork(after_in_child=_leave_to_parent)


def _agent(api: Any, name: str, *, lends: bool) -> Any:
    """An agent whose own thread, if it lends, is woken by what arrives, or by this time.

    NIXL's Python class leaves no choice of that time and sets it to 0, with which the thread never sleeps and costs a
    core for as long as the agent lives; so what it wraps is made anew before there is a backend that would see it.
    """
    bound = api.nixlBind
    config = api.nixl_agent_config(
        enable_prog_thread=lends, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    agent = api.nixl_agent(name, config)
    settings = bound.nixlAgentConfig()
    settings.useProgThread = lends
    settings.syncMode = bound.NIXL_THREAD_SYNC_STRICT
    settings.pthrDelay = _WAKES_EVERY_US
    agent.agent = bound.nixlAgent(name, settings)
    agent.create_backend("UCX")
    return agent


def _nixl() -> Any:
    if _CLASHING in sys.modules:
        raise TransferError(
            f"{_CLASHING} is loaded, and beside the libraries of NIXL it crashes the process",
            to_do="compile messages in a process of their own, or use TcpServer",
        )
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return api
    raise TransferError(
        "the RDMA transport needs NIXL, which is not installed",
        to_do="pip install --no-deps nixl-cu12==1.5.1 (rose-rl[rdma]), or use TcpServer",
    )
