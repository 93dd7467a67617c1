"""The ranks of a trainer, and how they reach each other while one version is published.

Invariants
- Every wait has a name and ends with the publish that it belongs to, at the latest when its time is up.
- After a failure the group is not used again: what another rank still waits for would be taken for something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rose.errors import TransferError
from rose.waits import WaitBoard
from rose_transfer.sharded.agreement import JointTrouble

_WHOM = "the trainer's ranks"
_TO_DO = "make a new process group and a new publisher on every rank"
_LAST_MOMENT_S = 0.01
_WORDS, _TROUBLE, _JOINT_TROUBLE = b"w", b"t", b"j"


class LostRank(TransferError):
    """A rank has died or did not answer in time; versions in the store are whole, this one is there or not at all."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """What is sent from and received into, flat uint8 where the backend reaches it."""

    sent: torch.Tensor
    received: torch.Tensor


class Ranks:
    """The ranks of `group`, which nothing else uses at the same time.

    Tensors travel from the devices that the backend of the group can reach. Raises ValueError if this process is not
    one of the group.
    """

    def __init__(self, group: dist.ProcessGroup, waits: WaitBoard) -> None:
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group that publishes")
        self.size = dist.get_world_size(group)
        self._group = group
        self._waits = waits
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self._ends_s = 0.0
        self._lost = ""

    @contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """All that is sent in the body takes at most `timeout_s` together.

        Raises LostRank at once if the ranks have lost each other before.
        """
        if self._lost:
            raise LostRank(f"the ranks have lost each other: {self._lost}", to_do=_TO_DO)
        self._ends_s = time.monotonic() + timeout_s
        yield

    def tell(self, words: bytes) -> list[bytes]:
        """What every rank tells, in their order. Every rank must call it, or `tell_trouble`.

        Raises TransferError that names the rank if one tells of trouble, JointTrouble as it was raised there, LostRank.
        """
        told = self._tell(_WORDS + words)
        for rank, data in enumerate(told):
            if data[:1] == _JOINT_TROUBLE:
                raise JointTrouble.from_bytes(data[1:])
            if data[:1] == _TROUBLE:
                raise TransferError(f"rank {rank} could not publish: {data[1:].decode()}", to_do="look at that rank")
        return [data[1:] for data in told]

    @contextmanager
    def telling_trouble(self) -> Iterator[None]:
        """The body is followed by `tell` at every rank; if it fails here, the others hear that there."""
        try:
            yield
        except LostRank:
            raise
        except Exception as error:
            self.tell_trouble(error)
            raise

    def tell_trouble(self, error: Exception) -> None:
        """In place of `tell`, at a rank that cannot go on. Raises LostRank."""
        if isinstance(error, JointTrouble):
            self._tell(_JOINT_TROUBLE + error.to_bytes())
        else:
            self._tell(_TROUBLE + (str(error) or type(error).__name__).encode())

    def _tell(self, words: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        mine = torch.tensor([len(words)], dtype=torch.int64, device=self._device)
        self._finish("word", lambda: dist.all_gather(lengths, mine, group=self._group, async_op=True))
        sizes = [int(length) for length in lengths]
        padded = np.zeros(max(sizes), dtype=np.uint8)
        padded[: len(words)] = np.frombuffer(words, dtype=np.uint8)
        sent = torch.from_numpy(padded).to(self._device)
        told = [torch.empty_like(sent) for _ in sizes]
        self._finish("word", lambda: dist.all_gather(told, sent, group=self._group, async_op=True))
        return [to_array(data)[:size].tobytes() for data, size in zip(told, sizes, strict=True)]

    def rooms(self, sent_bytes: int, received_bytes: int) -> Rooms:
        """Memory for exchanges of up to so many bytes. Raises MemoryError, or RuntimeError on a device."""
        return Rooms(
            torch.empty(sent_bytes, dtype=torch.uint8, device=self._device),
            torch.empty(received_bytes, dtype=torch.uint8, device=self._device),
        )

    def exchange(
        self, rooms: Rooms, parts: Iterable[torch.Tensor | None], lengths: Sequence[int], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Send `parts`, flat uint8 of these `lengths`, one to each rank; they are taken one by one.

        Anything is sent in place of None. Returns what the ranks send here, `sizes[rank]` bytes from each, in the room
        of the next exchange. Every rank must call it. Raises LostRank.
        """
        sent, received = rooms.sent[: sum(lengths)], rooms.received[: sum(sizes)]
        at = 0
        for part, length in zip(parts, lengths, strict=True):
            if part is not None:
                sent[at : at + length] = part
            at += length
        split = (list(sizes), list(lengths))
        self._finish(
            "pieces of buckets",
            lambda: dist.all_to_all_single(received, sent, *split, group=self._group, async_op=True),
        )
        return list(torch.split(received, list(sizes)))

    def send(self, data: NDArray[np.uint8], to: int) -> None:
        """Send bytes to one rank, which must call `receive`. Raises LostRank."""
        sent = torch.from_numpy(data).to(self._device)
        self._finish("room for a bucket", lambda: dist.isend(sent, group=self._group, group_dst=to))

    def receive(self, into: NDArray[np.uint8], sender: int) -> None:
        """As many bytes as `into` has from one rank, which must call `send`. Raises LostRank."""
        received = torch.from_numpy(into).to(self._device)
        self._finish("a bucket", lambda: dist.irecv(received, group=self._group, group_src=sender))
        if received.device.type != "cpu":
            into[:] = to_array(received)

    def _finish(self, what: str, start: Callable[[], dist.Work | None]) -> None:
        left_s = max(_LAST_MOMENT_S, self._ends_s - time.monotonic())
        with self._waits.waiting(what, _WHOM, left_s):
            try:
                work = start()
                if work is not None:
                    work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                self._lost = f"{what}: {str(error).splitlines()[0]}"
                raise LostRank(
                    f"rank {self.rank} did not get {what} from the others: {error}",
                    expected="every rank to publish the same version, and to live until it is there",
                    to_do=_TO_DO,
                ) from error


def to_array(data: torch.Tensor) -> NDArray[np.uint8]:
    """Flat uint8, wherever it lies, in host memory."""
    return data.cpu().numpy()
