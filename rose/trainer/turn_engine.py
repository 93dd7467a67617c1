"""What a turn is sampled on: one incarnation of an engine, the run's own or a lent one."""

from __future__ import annotations

from typing import Protocol

from rose_executor.token_page import RequestCount
from rose_executor.token_route import TokenRoute


class TurnEngine(Protocol):
    """Its counts are its own, and can be had after its death. `LiveEngine` and `LentEngine` are such engines."""

    @property
    def engine_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def route(self) -> TokenRoute: ...
    @property
    def lost(self) -> bool:
        """Known to be dead, or its counts cannot be had: no turn is to be sent there."""
        ...

    def total_tokens(self) -> int:
        """Tokens generated since this incarnation started, as far as is known here."""
        ...

    def request_tokens(self, request_id: str) -> int:
        """Tokens generated for one request, as far as is known here; 0 if it never got any."""
        ...

    async def final_request(self, request_id: str) -> RequestCount | None:
        """The count of a request whose stream broke: *finished* if nothing is added to it any more.

        Where that cannot be had in time it is what is known by then, None if that is nothing.
        """
        ...

    async def news_of_death(self) -> None:
        """Return once this incarnation is known to be lost, or after a moment: for who has just lost an answer."""
        ...
