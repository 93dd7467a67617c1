"""Partitioning of a GPU: through NVIDIA MPS, or by nothing but the driver's time slices.

Invariants
- MPS gives a ceiling, a memory limit and a lower priority at a guest's start. A running guest keeps what it has:
  what is wanted of it within a step is asked of its scheduler, and in an emergency it is frozen.
- Placing and freezing are done on the processor's side, by the partitioner that is there for that.
- A guest is terminated as a client before it is killed; this process's watchdog and the guest's own guards do so too.
- A guest that shall not be a client is kept from becoming one by chance.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

from rose.errors import ClusterError
from rose.processes import family
from rose_executor import mps_words
from rose_executor.engine_env import MPS_DIRECTORY
from rose_executor.mps_daemon import MpsDaemon
from rose_executor.mps_preflight import EXCLUSIVE, check_servers, serving_client
from rose_executor.mps_release import release
from rose_executor.mps_words import PIPE_DIRECTORY
from rose_executor.partition_terms import GuestLimits, Partition, Processors, Role

NO_DAEMON = os.devnull
"""A directory in which no daemon can be: a CUDA program that finds none runs without MPS."""
_INTERFERENCE = 1.0
"""A guest step's whole time, until somebody has measured less: SMs, caches and memory bandwidth are shared."""


class MpsPartitioner:
    """A guest as a client of the daemon that the serving engine is a client of.

    `serving` tells the serving engine's processes, none while they are not there; `modes` are the GPUs' compute modes.
    Raises ClusterError if MPS cannot hold a guest here.
    """

    def __init__(
        self,
        processors: Processors,
        daemon: MpsDaemon,
        limits: GuestLimits,
        serving: Callable[[], Collection[int]],
        modes: Collection[str],
    ) -> None:
        self._processors = processors
        self._daemon = daemon
        self._limits = limits
        self._serving = serving
        self._modes = modes
        self._server = self._checked()
        self._ceiling = daemon.ceiling(limits, self._server)

    def place(self, pid: int, role: Role) -> None:
        self._processors.place(pid, role)

    def freeze(self) -> None:
        self._processors.freeze()

    def thaw(self) -> None:
        self._processors.thaw()

    def set_share(self, share: float | None) -> None:
        raise ClusterError(
            "the share of a running MPS client cannot be changed",
            expected="a share that is known when the guest starts",
            to_do="set partition.guest_share and start the executor again",
        )

    def guest_env(self) -> Mapping[str, str | None]:
        self._server = self._checked()
        env = self._daemon.guest_env(self._limits, self._server, max(1, len(self._modes)))
        return {**env, MPS_DIRECTORY: str(self._daemon.directory)}

    def release(self, pid: int) -> None:
        if members := {one.pid for one in family(pid)}:
            release(self._daemon, members)

    def renew_watchdog(self) -> bool:
        return self._processors.renew_watchdog()

    def describe(self) -> Partition:
        inner = self._processors.describe()
        limits = [f"at most {self._ceiling:g} % of the GPU's threads", "a priority below normal (a hint)"]
        mib = mps_words.memory_mib(self._limits)
        if mib is not None:
            limits.append(f"at most {mib} MiB of each GPU")
        unseen = "" if self._server is not None else ", once the serving engine, which is not seen yet, is a client too"
        exclusive = (
            ""
            if EXCLUSIVE in self._modes
            else ("; the compute mode is not EXCLUSIVE_PROCESS, so who misses the daemon computes beside it unnoticed")
        )
        return Partition(
            name=f"MPS v{self._daemon.version}, {inner.name}",
            binds=f"a guest has {', '.join(limits)}, from its start on{unseen}; a running one keeps what it has, "
            f"only tokens per step and the freezer hold it back; on the processor {inner.binds}",
            costs=f"one fault domain: a fatal fault of the guest's ends serving on the same GPU{exclusive}; memory "
            f"bandwidth and caches are shared; on the processor {inner.costs}",
            interference=_INTERFERENCE,
            holds=self._server is not None,
        )

    def close(self) -> None:
        self._daemon.close()
        self._processors.close()

    def _checked(self) -> str | None:
        """The server that the serving engine is on, None while it is not seen."""
        check_servers(self._daemon, os.geteuid())
        client = serving_client(self._daemon, self._serving())
        return None if client is None else client.server


class TimeSlices:
    """Two engines on one GPU without MPS; `why` says why there is none."""

    def __init__(self, processors: Processors, why: str) -> None:
        self._processors = processors
        self._why = why

    def place(self, pid: int, role: Role) -> None:
        self._processors.place(pid, role)

    def freeze(self) -> None:
        self._processors.freeze()

    def thaw(self) -> None:
        self._processors.thaw()

    def set_share(self, share: float | None) -> None:
        if share is not None:
            raise no_limits(self._why)

    def guest_env(self) -> Mapping[str, str | None]:
        return {PIPE_DIRECTORY: NO_DAEMON}

    def release(self, pid: int) -> None:
        """Its contexts are its own."""

    def renew_watchdog(self) -> bool:
        return self._processors.renew_watchdog()

    def describe(self) -> Partition:
        inner = self._processors.describe()
        return Partition(
            name=f"time slices, {inner.name}",
            binds=f"nothing on the GPU: while both compute, the driver gives each its turn; on the processor "
            f"{inner.binds}",
            costs=f"no MPS ({self._why}): a guest's step beside one of serving's makes that twice as long; on the "
            f"processor {inner.costs}",
            interference=_INTERFERENCE,
            holds=False,
        )

    def close(self) -> None:
        self._processors.close()


def no_limits(why: str) -> ClusterError:
    """For limits that were asked for where nothing can keep them."""
    return ClusterError(
        f"a guest cannot be held to a share or to memory of the GPU: {why}",
        expected="NVIDIA MPS, with the serving engine as a client",
        to_do="mend that, or take [partition] out of the configuration",
    )
