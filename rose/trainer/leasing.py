"""How the turns of a run get their engines, and how executors elsewhere join in: scheduler, offers, counts, lend.toml.

Invariants
- One token, made for this run and kept in its runtime folder, opens its scheduler, its weights and the counts of
  engines that are lent to it; where the run has certificates, whoever comes shows one as well.
- Every incarnation of the run's own engine is watched by the books and known here before anyone is sent to it.
- `lend.toml` is there once scheduler and weights both answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from aiohttp import ClientSession

from rose import toml
from rose.certificates import Certificates
from rose.config import Job
from rose.errors import ClusterError
from rose.trainer.books import Books
from rose.trainer.engines import Engines
from rose.trainer.offering import Offering, ServingVersion
from rose.trainer.recorder import Recorder
from rose.trainer.run_scheduler import NAME, RunScheduler, open_scheduler
from rose.waits import WaitBoard
from rose_executor.counts_client import CountsClient
from rose_executor.supervisor import LiveEngine
from rose_executor.token_route import TokenRoute
from rose_scheduler.client import SchedulerClient

TELL_TIMEOUT_S = 5.0
COUNTS_TIMEOUT_S = 5.0
LENT_SILENCE_S = 20.0
"""A lent engine may stand still for as long as serving needs its core: then its turns are better off elsewhere."""
LEND_FILE = "lend.toml"
TOKEN_FILE = "token"


class Leasing:
    """Made by `open_leasing`; `run` must run for anything but finding engines to happen."""

    def __init__(
        self, scheduler: RunScheduler, client: SchedulerClient, engines: Engines, requests_max: int, recorder: Recorder
    ) -> None:
        self.client = client
        self.engines = engines
        self._scheduler = scheduler
        self._offering = Offering(client, requests_max)
        self._recorder = recorder

    def joins(self, engine: LiveEngine) -> None:
        """A new incarnation of the run's own engine, before anyone else has it."""
        self.engines.add_own(engine)
        self._offering.joins(engine)
        self._recorder.fact(f"metrics {engine.engine_id}", f"{engine.base_url}/metrics")

    async def run(self, serving: ServingVersion) -> None:
        """Keep scheduler, offers and counts going until cancelled. Raises what none of them can mend."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scheduler.run(), name="run scheduler")
            group.create_task(self._offering.run(serving), name="offers")
            group.create_task(self.engines.run(), name="counts")

    def lend(self, weights: str) -> None:
        """Say to executors how to join, now that `weights` answers. Raises ClusterError if it cannot be written."""
        runtime = self._recorder.run.runtime
        join = {"scheduler": self._scheduler.address, "weights": weights, "token_file": str(runtime / TOKEN_FILE)}
        write_secret(runtime / LEND_FILE, toml.dumps({"join": join}))
        for fact, value in (("scheduler", join["scheduler"]), ("weights", weights), ("lend", runtime / LEND_FILE)):
            self._recorder.fact(fact, str(value))


@contextlib.asynccontextmanager
async def open_leasing(
    job: Job,
    token: str,
    certificates: Certificates | None,
    recorder: Recorder,
    books: Books,
    http: ClientSession,
    waits: WaitBoard,
) -> AsyncIterator[Leasing]:
    """Start the scheduler of a run; once the body has ended, have the last counts of lent engines booked.

    Raises ClusterError if it does not start.
    """
    run, timeout_s = recorder.run, job.rollout.turn_timeout_s
    silence_s = min(timeout_s, LENT_SILENCE_S)

    def route(address: str, engine_id: str) -> TokenRoute:
        return TokenRoute(address, http, engine_id=engine_id, waits=waits, silence_s=silence_s, total_s=timeout_s)

    token_file = run.runtime / TOKEN_FILE
    write_secret(token_file, token)
    told = partial(recorder.part, NAME)
    opening = open_scheduler(run.output, token_file, job.run.certificates, job.scheduler.port, waits, told)
    async with opening as scheduler:
        address = await scheduler.ready()
        calling = partial(
            SchedulerClient, token=token, waits=waits, timeout_s=TELL_TIMEOUT_S, certificates=certificates
        )
        counts = partial(CountsClient, token=token, waits=waits, timeout_s=COUNTS_TIMEOUT_S, certificates=certificates)
        async with calling(address) as client:
            engines = Engines(books, waits, route=route, counts=counts, told=recorder.part)
            try:
                yield Leasing(scheduler, client, engines, job.engine.max_num_seqs, recorder)
            finally:
                await engines.close()


def new_token() -> str:
    """What a run's scheduler, weights and lent engines are opened with."""
    return secrets.token_hex(32)


def write_secret(path: Path, text: str) -> None:
    """A new file that its owner alone may read, whole under its name. Raises ClusterError."""
    draft = path.with_name(f".{path.name}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        raise ClusterError(f"{path} cannot be written: {error.strerror}") from error
