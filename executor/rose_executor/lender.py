"""What an executor needs of a scheduler: somebody to offer its guest to. This room knows no scheduler itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol


@dataclass(frozen=True, slots=True)
class GuestOffer:
    """One incarnation of a guest: where it answers, and where its tokens are counted."""

    engine_id: str
    incarnation: str
    address: str
    counts_address: str
    max_requests: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class GuestNow:
    """How it is: `slots_open` requests may be on it, those that it has included.

    It may hold `kv_tokens` now, and computes one of a context in `token_s` seconds; 0 is unknown.
    """

    weight_version: int
    slots_open: int
    kv_used_fraction: float
    kv_tokens: int = 0
    token_s: float = 0.0


class Lender(Protocol):
    """Offers guests to one scheduler. `trouble` says why it gives no turns just now, "" where it would, and None before
    it was asked."""

    @property
    def trouble(self) -> str | None: ...

    async def keep_offered(self, guest: GuestOffer, now: Callable[[], GuestNow]) -> NoReturn:
        """Offer it until cancelled, whether the scheduler is there or not.

        Raises EngineError if this incarnation is not taken, SchedulerError if nothing of ours ever will be.
        """
        ...

    async def withdraw(self, guest: GuestOffer, why: str) -> None:
        """Take it back, as far as the scheduler can be reached. Raises nothing of that."""
        ...
