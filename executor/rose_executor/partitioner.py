"""How a guest and a serving engine share a device: one interface, and the choice of what this machine has.

    GPU    MPS daemon    control groups   what is picked
    no     -             yes              a guest's group: idle class or smallest weight, freezer (v2 before v1)
    no     -             no               the idle scheduling class, stop signals
    yes    usable        as above         MPS, with that for the processor and the brake
    yes    not usable    as above         the driver's time slices, with that for the processor and the brake

Invariants
- The serving engine is pinned at most; it is never put into a group of ours, so nothing of ours can hold it back.
- The normal state lets the guest have what serving leaves; freezing is the brake for an emergency.
- What is chosen says its name and what it costs. It never pretends to be more: a limit that nothing keeps is refused.
- If this process is gone, SIGKILL included, guests are ended, frozen ones too: their watchdog and guards see to that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from rose.cgroup import own_groups
from rose.errors import ClusterError
from rose.logs import logger
from rose.machine import look
from rose_executor.guest_groups import v1_groups, v2_groups
from rose_executor.mps_daemon import MpsDaemon
from rose_executor.mps_preflight import check_modes, compute_modes, find_daemon, writers
from rose_executor.partition_groups import GroupPartitioner
from rose_executor.partition_mps import MpsPartitioner, TimeSlices, no_limits
from rose_executor.partition_terms import GuestHost, GuestLimits, Partition, Processors, Role
from rose_executor.partition_threads import ThreadPartitioner

__all__ = ["GuestLimits", "Partition", "Partitioner", "Role", "pick_for_guest", "pick_partitioner", "would_pick"]


log = logger("partition")


class Partitioner(Processors, GuestHost, Protocol):
    """One serving engine and one guest on the same device."""

    def set_share(self, share: float | None) -> None:
        """Hold a guest that runs to a part of the cores' time, None for no limit; it binds at once.

        Raises ClusterError where that cannot be done.
        """
        ...


def pick_partitioner(
    cores: Collection[int] = (),
    root: Path = Path("/"),
    *,
    share: float | None = None,
    mps_directory: Path | None = None,
    sweeps: bool = True,
) -> Partitioner:
    """The strongest for processors that works here, both engines pinned to `cores`, or to none where that is empty.

    What an executor left that is gone is removed first, unless this only looks (`sweeps`); what of it was a client of
    the MPS daemon in `mps_directory` leaves that before. Raises ClusterError if there are no such cores, or nothing
    that can keep the share.
    """
    groups = own_groups(root)
    refusals = []
    for found in (v2_groups(groups), v1_groups(groups)):
        if found is None:
            continue
        try:
            return GroupPartitioner(found, cores, share, mps_directory, sweeps=sweeps)
        except ClusterError as error:
            refusals.append(error.what)
    why = "; ".join(refusals) or "no control group with a processor controller"
    if refusals and sweeps:
        log.warning("the guest is kept by no control group, though this machine has them", why=why)
    threads = ThreadPartitioner(cores, why, mps_directory)
    threads.set_share(share)
    return threads


def would_pick() -> Partition:
    """What a guest without limits would be kept by on this machine. Touches no process. Raises as `pick_for_guest`."""
    with contextlib.closing(_pick((), GuestLimits(), lambda: (), sweeps=False)) as picked:
        return picked.describe()


def pick_for_guest(cores: Collection[int], limits: GuestLimits, board: Path) -> Partitioner:
    """The strongest for a guest on this machine, beside the serving engine that writes on `board`.

    Raises ClusterError if no guest can compute beside it, or if nothing here can keep the limits.
    """
    return _pick(cores, limits, lambda: writers(board), sweeps=True)


def _pick(
    cores: Collection[int], limits: GuestLimits, serving: Callable[[], Collection[int]], *, sweeps: bool
) -> Partitioner:
    if look().gpus:
        return pick_on_gpu(cores, limits, serving, compute_modes(), find_daemon, sweeps=sweeps)
    if limits.memory_gib is not None:
        raise no_limits("there is no GPU")
    return pick_partitioner(cores, share=limits.share, sweeps=sweeps)


def pick_on_gpu(
    cores: Collection[int],
    limits: GuestLimits,
    serving: Callable[[], Collection[int]],
    modes: Collection[str],
    find: Callable[[], MpsDaemon],
    *,
    sweeps: bool = True,
) -> Partitioner:
    """As `pick_for_guest`; `find` raises ClusterError if there is no daemon."""
    try:
        daemon = find()
    except ClusterError as error:
        return _time_slices(pick_partitioner(cores, sweeps=sweeps), limits, modes, error.what)
    check_modes(modes, "")
    processors = pick_partitioner(cores, mps_directory=daemon.directory, sweeps=sweeps)
    try:
        return MpsPartitioner(processors, daemon, limits, serving, modes)
    except ClusterError as error:
        return _time_slices(processors, limits, modes, error.what)


def _time_slices(processors: Partitioner, limits: GuestLimits, modes: Collection[str], why: str) -> TimeSlices:
    try:
        check_modes(modes, why)
        if limits != GuestLimits():
            raise no_limits(why)
    except ClusterError:
        processors.close()
        raise
    return TimeSlices(processors, why)
