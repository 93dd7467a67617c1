"""Pairs by NCCL through CuPy, between GPUs. Imported only when it is used.

Bytes go from pinned host memory over a device buffer of one piece to the other GPU, and back; each pair has a stream.

Invariants
- The two ends must be on different GPUs; NCCL refuses two ranks on one.
- CuPy's way to join a communicator blocks and cannot be aborted, so it runs in a thread of its own: past the deadline
  the thread is left behind, and ends with the process at the latest.
- Each call has a watchdog that aborts the communicator at the deadline; that ends NCCL's kernels and its waits.
- A communicator is aborted between calls of NCCL, for aborting frees what a call may use. Only a call that does not
  come back within `_STUCK_S`, as the first one does whose other end froze, is aborted while it runs.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from rose.errors import DeadlineExceeded, TransferError
from rose_transfer.transport.frames import PIECE_BYTES_MAX

_ID_BYTES = 128
_POLL_S = 5e-5
_STUCK_S = 5.0


class NcclCollective:
    """Pairs on GPU number `device`. Raises TransferError if CuPy, NCCL or the GPU is missing."""

    name = "nccl"

    def __init__(self, device: int = 0) -> None:
        self._cupy = _cupy()
        self._device = device
        try:
            devices = self._cupy.cuda.runtime.getDeviceCount()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise TransferError(f"NCCL needs a GPU: {error}", to_do="use RDMA or TcpServer") from error
        if not 0 <= device < devices:
            raise TransferError(f"there is no GPU {device}", expected=f"0 to {devices - 1}")

    def make_id(self) -> bytes:
        """NCCL's unique id."""
        return bytes(self._cupy.cuda.nccl.get_unique_id())

    def join(self, pair_id: bytes, rank: int, deadline_s: float) -> NcclPair:
        """See `collective.Collective`."""
        if len(pair_id) != _ID_BYTES:
            raise TransferError(f"a pair id of {len(pair_id)} bytes", expected=f"{_ID_BYTES}")
        joining: Future[Any] = Future()

        def join() -> None:
            try:
                with self._cupy.cuda.Device(self._device):
                    joining.set_result(self._cupy.cuda.nccl.NcclCommunicator(2, pair_id, rank))
            except Exception as error:  # noqa: BLE001 handed on
                joining.set_exception(error)

        threading.Thread(target=join, name="rose-nccl-join", daemon=True).start()
        try:
            communicator = joining.result(deadline_s)
        except TimeoutError as error:
            # Should the other end come after all, nobody is here to meet it.
            joining.add_done_callback(lambda late: late.exception() or late.result().abort())
            raise DeadlineExceeded(f"nccl: no other end after {deadline_s:g} s", boundary="transfer") from error
        except Exception as error:
            raise TransferError(f"nccl cannot join: {error}", expected="the two ends on different GPUs") from error
        try:
            return NcclPair(self._cupy, self._device, communicator, 1 - rank)
        except Exception as error:
            # The other end waits for nobody then.
            threading.Thread(target=communicator.abort, name="rose-nccl-abort", daemon=True).start()
            raise TransferError(
                f"GPU {self._device} or the host has no room for a piece: {error}",
                expected=f"{PIECE_BYTES_MAX} bytes on each",
            ) from error


class NcclPair:
    """See `collective.CommunicatorPair`."""

    def __init__(self, cupy: Any, device: int, communicator: Any, other: int) -> None:
        self._cupy = cupy
        self._on = cupy.cuda.Device(device)
        self._communicator = communicator
        self._other = other
        self._aborted = threading.Event()
        self._calling = threading.Lock()
        with self._on:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._buffer = cupy.empty(PIECE_BYTES_MAX, dtype=cupy.uint8)
            self._pinned = cupy.cuda.alloc_pinned_memory(PIECE_BYTES_MAX)
        # Its bytes are signed ones, which do not go together with those of any other buffer.
        self.room = memoryview(self._pinned).cast("B")[:PIECE_BYTES_MAX]

    def send(self, length: int, deadline_s: float) -> None:
        with self._call("send", deadline_s):
            self._copy(self._buffer.data.ptr, self._pinned.ptr, length)
            self._queue(self._communicator.send, length)

    def receive(self, length: int, deadline_s: float) -> None:
        with self._call("receive", deadline_s):
            self._queue(self._communicator.recv, length)
            self._copy(self._pinned.ptr, self._buffer.data.ptr, length)

    def abort(self) -> None:
        """In a thread: it may wait for the GPU to let go."""
        if not self._aborted.is_set():
            self._aborted.set()
            threading.Thread(target=self._end, name="rose-nccl-abort", daemon=True).start()

    def _end(self) -> None:
        between_calls = self._calling.acquire(timeout=_STUCK_S)
        try:
            self._communicator.abort()
        finally:
            if between_calls:
                self._calling.release()

    def _queue(self, move: Callable[[int, int, int, int, int], None], length: int) -> None:
        byte = int(self._cupy.cuda.nccl.NCCL_UINT8)
        with self._calling:
            if not self._aborted.is_set():
                move(self._buffer.data.ptr, length, byte, self._other, self._stream.ptr)

    def _check(self) -> None:
        with self._calling:
            if not self._aborted.is_set():
                self._communicator.check_async_error()

    def _copy(self, to: int, from_: int, length: int) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(to, from_, length, runtime.memcpyDefault, self._stream.ptr)

    @contextmanager
    def _call(self, what: str, deadline_s: float) -> Iterator[None]:
        """Queue work on the stream in the body; it is done on the way out. Raises TransferError, DeadlineExceeded."""
        until_s = time.monotonic() + deadline_s
        watchdog = threading.Timer(deadline_s, self.abort)
        watchdog.start()
        try:
            with self._on:
                self._raise_if_aborted(what, until_s, deadline_s)
                yield
                event = self._cupy.cuda.Event(disable_timing=True)
                event.record(self._stream)
                while not event.done and not self._aborted.wait(_POLL_S):
                    self._check()
        except (self._cupy.cuda.nccl.NcclError, self._cupy.cuda.runtime.CUDARuntimeError) as error:
            self._raise_if_aborted(what, until_s, deadline_s)
            self.abort()
            raise TransferError(f"nccl cannot {what}: {error}") from error
        finally:
            watchdog.cancel()
        self._raise_if_aborted(what, until_s, deadline_s)

    def _raise_if_aborted(self, what: str, until_s: float, deadline_s: float) -> None:
        if self._aborted.is_set():
            if time.monotonic() >= until_s:
                raise DeadlineExceeded(f"nccl: no {what} after {deadline_s:g} s", boundary="transfer")
            raise TransferError("the nccl pair was aborted")


def _cupy() -> Any:
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise TransferError(
            "the NCCL transport needs CuPy, which is not installed",
            to_do="pip install rose-rl[gpu], or use RDMA or TcpServer",
        ) from error
    if not nccl.available:
        raise TransferError("CuPy finds no NCCL", to_do="pip install nvidia-nccl-cu13, or cu12 as CuPy is")
    return cupy
