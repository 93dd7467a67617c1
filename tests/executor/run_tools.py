"""A run that lends, as far as an executor sees one: a publisher and a scheduler. And a serving engine's half."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rose.certificates import Certificates
from rose.cgroup import own_groups
from rose.metrics import SchedulerMetrics
from rose.trainer.answering import known_answer, question
from rose.trainer.policy import load_policy, rounded_bf16
from rose.waits import WaitBoard
from rose_executor.board import SERVING, HalfWriter
from rose_executor.board_states import ServingState
from rose_executor.guest_groups import PREFIX
from rose_scheduler.client import SchedulerClient, Turn
from rose_scheduler.desk import Desk
from rose_scheduler.limits import Limits
from rose_scheduler.placement import Placement
from rose_scheduler.service import serve
from rose_transfer.distribution import WeightPublisher
from rose_transfer.snapshot import WEIGHTS
from rose_transfer.transport.tcp import TcpServer

TOKEN = "0123456789abcdef" * 2
LONG_S = 240.0
"""Longer than anything here takes, also where a guest, which is of the idle class, hardly gets a core."""


@dataclass
class LendingRun:
    """`desk` is the scheduler's own, to look into; `client` samples on leases."""

    folder: Path
    model: Path
    desk: Desk
    scheduler: str
    weights: str
    client: SchedulerClient
    publisher: WeightPublisher
    leases: int = 0
    answers: bool = False
    _masters: dict[str, torch.Tensor] = field(default_factory=dict)

    async def publish(self, version: int) -> None:
        """The model's weights, changed a little; with what they answer, if `answers` are told."""
        if not self._masters:
            self._masters = {name: tensor.float() for name, tensor in load_file(self.model / WEIGHTS).items()}
        generator = torch.Generator().manual_seed(version)
        moved = {name: one + 0.02 * torch.randn(one.shape, generator=generator) for name, one in self._masters.items()}
        weights = {name: tensor.float() for name, tensor in rounded_bf16(moved).items()}
        answer = None
        if self.answers:
            policy = load_policy(self.model)
            policy.load_weights(weights)
            answer = known_answer(policy, question(policy.vocabulary, 40))
        await self.publisher.publish(version, weights, answer)

    @property
    def engines(self) -> list[Any]:
        """Those that the scheduler would give turns to."""
        return [engine for engine in self.desk.core.engines if engine.health == "healthy" and engine.slots]

    def lease(self, *, min_version: int = 0) -> Any:
        self.leases += 1
        turn = Turn(f"trajectory-{self.leases}", "group", 1, 10, min_version)
        return self.client.lease(turn, wait_s=LONG_S, hold_s=LONG_S)

    def join_file(self) -> Path:
        """As a run writes it."""
        token = self.folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        file = self.folder / "lend.toml"
        file.write_text(f'[join]\nscheduler = "{self.scheduler}"\nweights = "{self.weights}"\ntoken_file = "{token}"\n')
        return file


@asynccontextmanager
async def lending_run(folder: Path, model: Path, certificates: Certificates | None = None) -> AsyncIterator[LendingRun]:
    waits = WaitBoard()
    desk = Desk(Placement(Limits()), waits, SchedulerMetrics())
    server, scheduler = await serve(desk, port=0, token=TOKEN, certificates=certificates)
    tls = None if certificates is None else certificates.server_context
    serving = [partial(TcpServer, token=TOKEN, waits=waits, tls=tls)]
    try:
        async with (
            WeightPublisher(folder / "publisher", waits=waits, serve=serving) as publisher,
            SchedulerClient(scheduler, token=TOKEN, waits=waits, timeout_s=LONG_S, certificates=certificates) as client,
        ):
            weights = f"127.0.0.1:{publisher.servers[0].port}"  # type: ignore[attr-defined]
            yield LendingRun(folder, model, desk, scheduler, weights, client, publisher)
    finally:
        desk.close()
        await server.stop(None)


class IdleServing:
    """A serving engine that has nothing to do, as its probe would say; `silent` stops that."""

    def __init__(self, board: Path, silent: bool = False) -> None:
        self.board = board
        self.silent = silent

    async def run(self) -> None:
        writer: HalfWriter[ServingState] | None = None
        while True:
            if writer is None and self.board.exists():
                writer = HalfWriter(self.board, SERVING)
            if writer is not None and not self.silent:
                writer.write(ServingState(steps=9, stepped_at_s=time.monotonic(), kv_blocks_total=100))
            await asyncio.sleep(0.05)


async def until(so: Callable[[], object]) -> None:
    """Wait for something to become so."""
    async with asyncio.timeout(LONG_S):
        while not so():
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def lifted_guests() -> Iterator[None]:
    """Take guests' groups out of the idle class again and again: tests beside this one may want all cores for long.

    Where that cannot be done, the body takes as long as it takes.
    """
    groups, over = own_groups(), threading.Event()
    cpu = groups.v1.get("cpu", groups.v2)

    def lift() -> None:
        while not over.wait(0.1):
            for group in [] if cpu is None else cpu.glob(f"{PREFIX}*"):
                with contextlib.suppress(OSError):
                    (group / "cpu.idle").write_text("0", encoding="ascii")

    thread = threading.Thread(target=lift, name="lifts guests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
