"""A small fleet as a dashboard finds it: real status pages and real /metrics servers, with figures that move."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from rose.ledger import Account
from rose.metrics import ExecutorMetrics, LoadMetrics, Metrics, serve
from rose.runs import open_service
from rose.status import StatusBoard
from rose.waits import WaitBoard

HTML = "<img src=x onerror=\"document.title='owned'\">"
SCHEDULER = "127.0.0.1:7080"


class Fleet:
    """A director with its load, an executor, a scheduler and a run. Nothing moves but by `move`."""

    def __init__(self, out: Path, stack: contextlib.ExitStack) -> None:
        self._out, self._stack = out, stack
        self._random = random.Random(7)
        self._second = 0
        self.load, self.executor, self.run = LoadMetrics(), ExecutorMetrics(), Metrics()
        self.executor.slo_seconds.labels("ttft").set(0.31)
        self.executor.slo_seconds.labels("tpot").set(0.022)
        engines = CollectorRegistry()
        self._engine = Counter("vllm:generation_tokens", "-", ["model_name"], registry=engines)
        self.director = self.service("demo")
        self.director.fact("metrics load", self.serve(self.load.registry))
        self.director.part("serving", "ready", "alone first, then shared")
        self.executor_board = self.service("executor")
        self.executor_board.fact("metrics", self.serve(self.executor.registry))
        self.executor_board.fact("scheduler", SCHEDULER)
        self.executor_board.part("partition", "idle class", "binds on this kernel; serving steps 6 % longer")
        self.executor_board.part("scheduler", "reached")
        self.run_waits = WaitBoard()
        self.run_board = self.service("frozen-lake", self.run_waits)
        self.run_board.fact("metrics", self.serve(self.run.registry))
        self.run_board.fact("metrics engine-0", self.serve(engines))
        self.run_board.fact("scheduler", SCHEDULER)
        self.run_board.fact("steps", 12)
        self.run_board.part("engine-0", "healthy", "")
        self.run_board.part("environments", "ready", f"1 episode failed: {HTML}")
        stack.enter_context(self.run_waits.waiting("turn", "engine-0", 60.0))
        stack.enter_context(self.run_waits.waiting("step", f"environment {HTML}", 30.0))
        for _ in range(3):
            self.move()

    def service(self, name: str, waits: WaitBoard | None = None) -> StatusBoard:
        waits = waits or WaitBoard()
        run = self._stack.enter_context(open_service(name, self._out, waits, {}))
        return self._stack.enter_context(StatusBoard(run, waits))

    def serve(self, registry: CollectorRegistry) -> str:
        server = self._stack.enter_context(contextlib.closing(serve(0, registry)))
        return server.url

    def move(self) -> None:
        """One second goes by."""
        self._second += 1
        busy = 0.35 + 0.25 * math.sin(self._second / 9) + self._random.uniform(-0.04, 0.04)
        for _ in range(6):
            self.load.requests.labels("completed").inc()
            self.load.ttft_seconds.observe(0.05 + 0.16 * busy * self._random.random() * 2)
            self.load.tpot_seconds.observe(0.008 + 0.012 * busy * self._random.random() * 1.4)
        step = 1 + self._second // 20
        guest = max(0.0, 0.9 - busy)
        for who, share in (("serving", busy), ("guest", guest)):
            self.executor.compute_ratio.labels(who).set(share)
            self.executor.kv_used_ratio.labels(who).set(0.2 + 0.6 * share)
            self.executor.requests.labels(who).set(round(10 * share))
        self.executor.gate_open_ratio.set(min(1.0, 1.2 * guest))
        self.executor.slots_open.set(12)
        self.executor_board.part("guest", "lent", f"12 requests may be on it; {round(10 * guest)} running, 0 waiting")
        self.executor_board.part("serving", "serving", f"{round(10 * busy)} running, 0 waiting, slack 14 ms")
        self.executor_board.part("follower", "following", f"version {max(0, step - 1)}")
        self.executor.weight_version.set(max(0, step - 1))
        self.executor.guest_tokens.inc(900 * guest)
        self._engine.labels("guest").inc(1400 + self._random.uniform(-100, 100))
        self._account(step)

    def _account(self, step: int) -> None:
        shares = {Account.TRAINED: 0.62, Account.ZERO_VARIANCE: 0.2, Account.EVALUATION: 0.1, Account.IN_FLIGHT: 0.08}
        generated = 0
        for account in Account:
            tokens = round(2200 * self._second * shares.get(account, 0))
            self.run.tokens.labels(account).set(tokens)
            generated += tokens
        self.run.tokens_generated.set(generated)
        self.run.success_fraction.labels("train").set(min(0.8, 0.1 + 0.06 * step))
        self.run.success_fraction.labels("evaluation").set(min(0.82, 0.08 + 0.066 * step))
        self.run.weight_version.labels("engine-0").set(step)
        self.run_board.fact("step", step)
        self.run_board.fact("version", step)


@contextlib.contextmanager
def fleet(out: Path) -> Iterator[Fleet]:
    """A fleet under the runtime root of the environment, ended with the body."""
    with contextlib.ExitStack() as stack:
        yield Fleet(out, stack)
