"""Pairs by torch's gloo, on CPUs. It shows on any machine that the promises of `collective` hold; TCP is faster.

Invariants
- A pair is a process group of its own, never registered with `torch.distributed`.
- The store by which two ends find each other listens on `host` only. It knows no token: what crosses is proved by the
  checksums that come on the control connection.
- Gloo cannot call a transfer back: one that is aborted ends when the other end goes, or at its deadline.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from rose.errors import DeadlineExceeded, TransferError
from rose_transfer.transport.frames import PIECE_BYTES_MAX
from rose_transfer.transport.tcp import LOOPBACK

_STORE_S = 60.0
# Its stubs leave out what is needed to make a group that is not the default one.
_dist: Any = torch.distributed


class GlooCollective:
    """`host` is the address by which the others of the cluster reach this process."""

    name = "gloo"

    def __init__(self, host: str = LOOPBACK) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._store: Any = None
        self._nonce = secrets.token_hex(8)

    def make_id(self) -> bytes:
        """Host and port of this process's store, and a name of the pair's own in it."""
        with self._lock:
            if self._store is None:
                self._store = _serve_store(self._host)
        return f"{self._host} {self._store.port} {self._nonce}-{next(self._numbers)}".encode()

    def join(self, pair_id: bytes, rank: int, deadline_s: float) -> GlooPair:
        """See `collective.Collective`."""
        try:
            host, port, name = pair_id.decode().split(" ")
            return GlooPair(self._host, (host, int(port)), name, rank, deadline_s)
        except ValueError as error:
            raise TransferError(f"{pair_id!r} names no gloo pair") from error


class GlooPair:
    """See `collective.CommunicatorPair`."""

    def __init__(self, own_host: str, store_at: tuple[str, int], name: str, rank: int, deadline_s: float) -> None:
        patience = timedelta(seconds=deadline_s)
        try:
            store = _dist.TCPStore(*store_at, is_master=False, timeout=patience, wait_for_workers=False)
            options = _dist.ProcessGroupGloo._Options()
            options._timeout = patience
            options._threads = 1
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=own_host)]
            self._group: Any = _dist.ProcessGroupGloo(_dist.PrefixStore(name, store), rank, 2, options)
        except RuntimeError as error:
            raise _failed("join", error, deadline_s) from error
        self._other = 1 - rank
        self._tensor = torch.zeros(PIECE_BYTES_MAX, dtype=torch.uint8)
        self.room = self._tensor.numpy().data

    def send(self, length: int, deadline_s: float) -> None:
        group = self._alive()
        self._wait(group.send([self._tensor[:length]], self._other, 0), "send", deadline_s)

    def receive(self, length: int, deadline_s: float) -> None:
        group = self._alive()
        self._wait(group.recv([self._tensor[:length]], self._other, 0), "receive", deadline_s)

    def abort(self) -> None:
        # A call under way holds the group; without one this closes the connection, which ends the other's call.
        self._group = None

    def _alive(self) -> Any:
        group = self._group
        if group is None:
            raise TransferError("the gloo pair was aborted")
        return group

    def _wait(self, work: Any, what: str, deadline_s: float) -> None:
        try:
            work.wait(timedelta(seconds=deadline_s))
        except RuntimeError as error:
            self.abort()
            raise _failed(what, error, deadline_s) from error
        self._alive()


def _serve_store(host: str) -> Any:
    with socket.create_server((host, 0)) as listener:
        # Given a socket of ours, the store does not listen on all addresses as it would by itself.
        return _dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=_STORE_S),
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )


def _failed(what: str, error: RuntimeError, deadline_s: float) -> TransferError | DeadlineExceeded:
    text = str(error).partition("\n")[0]
    if "imed out" in text or "timeout" in text:
        return DeadlineExceeded(f"gloo: no {what} after {deadline_s:g} s", boundary="transfer")
    return TransferError(f"gloo cannot {what}: {text}")
