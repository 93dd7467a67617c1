"""The user's serving engine: bursts of requests, steps on the shared core, its half of the board after each step.

Invariants
- It knows of no guest: what one costs it shows only in how long its steps take.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from rose.simulator.coserving.board import SimulatedBoard
from rose.simulator.coserving.parts import PartsDriver
from rose.simulator.coserving.shared_core import SharedCore
from rose_executor.board import SERVING
from rose_executor.serving_steps import ServingSteps

RUNNING_MAX = 4
STEP_S = 0.008
TOKEN_S = 0.0006


@dataclass(slots=True)
class _Served:
    number: int
    prompt: int
    left: int


class ServingEngine:
    """`alive` while it runs; `served` counts the requests that it has answered to their end."""

    def __init__(self, core: SharedCore, board: SimulatedBoard, driver: PartsDriver) -> None:
        self.alive = False
        self.served = 0
        self._core = core
        self._board = board
        self._driver = driver
        self._waiting: deque[_Served] = deque()
        self._running: list[_Served] = []
        self._stepping = False
        self._life = 0
        self._asked = 0
        self.start()

    def start(self) -> None:
        self.alive = True
        self._life += 1
        self._steps = ServingSteps(1000, self._driver.now)
        self._board.serving_died_s = None
        self._board.write(SERVING, self._steps.state, self._driver.now)

    def crash(self) -> None:
        """Die at once, and with it what it served."""
        if self.alive:
            self.alive = False
            self._board.serving_died_s = self._driver.now
            self._waiting.clear()
            self._running.clear()

    def request(self, prompt: int, outputs: int) -> None:
        """A user asks. A dead engine takes nothing."""
        if self.alive:
            self._asked += 1
            self._waiting.append(_Served(self._asked, prompt, outputs))
            self._board.write(SERVING, self._steps.arrived(self._asked, self._driver.now), self._driver.now)
            self._step()

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def _step(self) -> None:
        if self._stepping or not self.alive or not self.busy:
            return
        self._stepping = True
        tokens, prompt_tokens, first_tokens = len(self._running), 0, 0
        while self._waiting and len(self._running) < RUNNING_MAX:
            one = self._waiting.popleft()
            tokens += one.prompt
            prompt_tokens += one.prompt
            first_tokens += 1
            self._running.append(one)
        life = self._life
        ended = partial(self._stepped, life, tokens, prompt_tokens, first_tokens)
        self._core.serving_begins(STEP_S + TOKEN_S * tokens, ended)

    def _stepped(self, life: int, tokens: int, prompt_tokens: int, first_tokens: int) -> None:
        self._stepping = False
        if self.alive and life == self._life:
            for one in self._running:
                one.left -= 1
            over = [one for one in self._running if one.left <= 0]
            self._running = [one for one in self._running if one.left > 0]
            self.served += len(over)
            state = self._steps.stepped(
                running=len(self._running),
                waiting=len(self._waiting),
                kv_usage=0.1,
                tokens=tokens,
                prompt_tokens=prompt_tokens,
                first_tokens=first_tokens,
                finished=len(over),
                now_s=self._driver.now,
            )
            for one in over:
                state = self._steps.left(one.number)
            self._board.write(SERVING, state, self._driver.now)
        self._driver.call(self._core.gap_s, "", self._step)
