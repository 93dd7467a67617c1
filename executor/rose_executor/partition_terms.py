"""The words of partitioning that its implementations share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Role(StrEnum):
    """Who a process is."""

    SERVING = "serving"
    GUEST = "guest"


@dataclass(frozen=True, slots=True)
class Partition:
    """What keeps the two apart: its `name`, what it `binds` the guest to, and what it `costs`, for status and logs.

    It `holds` the guest where something other than the guest itself keeps it below serving on whatever both compute on.
    `interference` is the part of a guest step's processor time by which a serving step beside it becomes longer.
    """

    name: str
    binds: str
    costs: str
    interference: float
    holds: bool


@dataclass(frozen=True, slots=True)
class GuestLimits:
    """What a guest may have at most of what the two compute on, None where it may have all.

    `share` is a part of 1: of the GPU's threads, or of the cores' time where there is no GPU. `memory_gib` is of each
    GPU's memory.
    """

    share: float | None = None
    memory_gib: float | None = None


class GuestHost(Protocol):
    """What a guest's processes are started and ended with."""

    def guest_env(self) -> Mapping[str, str | None]:
        """Changes to the environment of a guest that is about to start: None removes.

        May ask other processes, a few seconds at most. Raises ClusterError if no guest may be started now.
        """
        ...

    def release(self, pid: int) -> None:
        """Called before a guest of this process is killed, so that its end harms nobody beside it.

        Takes a few seconds at most. Raises ClusterError if the device would not let go of it.
        """
        ...

    def thaw(self) -> None:
        """Let a guest that was frozen go on: after a SIGKILL, to die of it. Raises ClusterError."""
        ...


class Processors(Protocol):
    """Keeps one serving engine and one guest apart on the processor's side."""

    def place(self, pid: int, role: Role) -> None:
        """Put a process with all its threads and descendants where its role belongs.

        What they start later follows them. Raises ClusterError if the kernel refuses.
        """
        ...

    def freeze(self) -> None:
        """Stop every process of the guest, those that it starts meanwhile included. Raises ClusterError."""
        ...

    def thaw(self) -> None:
        """Let them go on. Raises ClusterError."""
        ...

    def renew_watchdog(self) -> bool:
        """What ends guests when this process is gone may die itself: start another then; whether that was so.

        Raises ClusterError if there can be none; the next call tries again.
        """
        ...

    def describe(self) -> Partition: ...

    def close(self) -> None:
        """Remove what was made. What a guest that still runs holds stays, and the next start removes it."""
        ...
