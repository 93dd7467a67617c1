"""The words of partitioning that its implementations share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Who a process is."""

    SERVING = "serving"
    GUEST = "guest"


@dataclass(frozen=True, slots=True)
class Partition:
    """What keeps the two apart: its `name`, what it `binds` the guest to, and what it `costs`, for status and logs.

    `interference` is the part of a guest step's processor time by which a serving step beside it becomes longer.
    """

    name: str
    binds: str
    costs: str
    interference: float
