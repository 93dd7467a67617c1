"""`rose executor`: the agent beside a serving engine, and how it speaks to a run's scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import NoReturn

import typer

from rose.certificates import Certificates
from rose.errors import ContractError, DeadlineExceeded, EngineError, SchedulerError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.executor_config import load_executor_config
from rose_executor.executor_program import run_executor
from rose_executor.lender import GuestNow, GuestOffer
from rose_scheduler.client import EngineState, NotTaken, SchedulerClient
from rose_scheduler.events import EngineKind, EngineOffered

log = logger("lender")

_BEAT_EVERY_S = 0.25
"""A shut gate, or a new version, is known to the scheduler soon."""
_CALL_S = 2.0


def executor_command(config: Path | None, join: Path | None, flags: Mapping[str, object]) -> None:
    """Lend until SIGTERM, which ends it with status 0, or Ctrl-C.

    Raises as `run_executor` and `load_executor_config`.
    """
    if not run_executor(load_executor_config(config, join, flags), open_lender, _tell):
        raise KeyboardInterrupt


def _tell(counts_address: str, metrics_url: str) -> None:
    typer.echo(f"executor: counts on {counts_address}; metrics on {metrics_url}")


class SchedulerLender:
    """A scheduler's client as the executor room knows it: implements `rose_executor.lender.Lender`."""

    def __init__(self, client: SchedulerClient) -> None:
        self.trouble: str | None = None
        self._client = client

    async def keep_offered(self, guest: GuestOffer, now: Callable[[], GuestNow]) -> NoReturn:
        def state() -> EngineState:
            current = now()
            return EngineState(
                current.weight_version,
                current.slots_open,
                current.kv_used_fraction,
                current.kv_tokens,
                current.token_s,
            )

        try:
            await self._client.keep_offered(_lent(guest), state, every_s=_BEAT_EVERY_S, told=self._told)
        except NotTaken as error:
            raise EngineError(error.what, expected=error.expected, to_do=error.to_do) from error

    async def withdraw(self, guest: GuestOffer, why: str) -> None:
        try:
            await self._client.withdraw(_lent(guest), why)
        except (ContractError, DeadlineExceeded, SchedulerError) as error:
            log.warning("the guest could not be withdrawn; its silence will say so", why=str(error))

    def _told(self, trouble: str) -> None:
        self.trouble = trouble


@contextlib.asynccontextmanager
async def open_lender(
    address: str, token: str, certificates: Certificates | None, waits: WaitBoard
) -> AsyncIterator[SchedulerLender]:
    """Lend to the scheduler at an address."""
    async with SchedulerClient(
        address, token=token, waits=waits, timeout_s=_CALL_S, certificates=certificates
    ) as client:
        yield SchedulerLender(client)


def _lent(guest: GuestOffer) -> EngineOffered:
    return EngineOffered(
        guest.engine_id,
        guest.incarnation,
        EngineKind.LENT,
        guest.address,
        guest.max_requests,
        guest.weight_version,
        guest.counts_address,
    )
