"""The guest: a rollout engine on the shared core, which takes its quota from the board at the top of each step.

Invariants
- What a step may compute is decided by the product's own `guest_admission`, at the top of the step.
- A deaf guest takes no quota at all, and computes whether it is asked for anything or not.
- A frozen one computes nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rose.simulator.coserving.board import SimulatedBoard
from rose.simulator.coserving.engine import Request, RolloutEngine
from rose.simulator.coserving.shared_core import SharedCore
from rose_executor.board import GUEST, QUOTA, SERVING
from rose_executor.board_states import Given, GuestState, Quota
from rose_executor.guest_admission import GuestAdmission
from rose_executor.step_shape import StepShape

LIMITS = Quota(kv_blocks=100, tokens_per_step=64, active_seqs=8, gate_open=True)
STEP_S = 0.003
TOKEN_S = 0.0025
_POLL_S = 0.02


def step_cost_s(tokens: int) -> float:
    """What a step of the guest costs on the core when it has it to itself."""
    return STEP_S + TOKEN_S * tokens


class GuestEngine(RolloutEngine):
    """`begins` is told of every step that it begins: tokens, and what the step will cost in seconds."""

    def __init__(
        self, *args: Any, core: SharedCore, board: SimulatedBoard, begins: Callable[[GuestEngine, int, float], None]
    ) -> None:
        super().__init__(*args)
        self.deaf = False
        self.frozen = False
        self.admission = GuestAdmission(LIMITS, self.driver.now)
        self._core = core
        self._board = board
        self._begins = begins
        self._stepping = False
        self._steps = self.computed_steps = 0
        self._step_s = self._busy_s = 0.0
        self._step_tokens = 0
        core.freed = self.kick

    def freeze(self) -> None:
        """Stopped, in the middle of a step if need be."""
        self.frozen = True
        self._core.guest_stops()

    def crash(self) -> None:
        super().crash()
        if not self.frozen:
            self._core.guest_stops()

    def kick(self) -> None:
        if self._stepping or self.frozen or not self.alive or self._core.serving_busy:
            return
        if not self.requests and not self.deaf:
            return
        self._look()
        if not self.weights.serving:
            self._stepping = True
            self.driver.call(_POLL_S, "", lambda: self._stepped([], 0, 0.0))
            return
        allowed = self.admission.allowed
        planned = self.plan(allowed.tokens_per_step, allowed.active_seqs) if self.admission.open else []
        tokens = sum(share for _, share in planned) or int(self.deaf)
        self._report()
        if tokens:
            self._stepping = True
            cost_s = step_cost_s(tokens) * self.driver.random.uniform(0.9, 1.1)
            self._begins(self, tokens, cost_s)
            self._core.guest_begins(cost_s, lambda: self._stepped(planned, tokens, cost_s))

    def _look(self) -> None:
        now = self.driver.now
        if self.deaf:
            self.admission.look(Given(LIMITS, 0, None), now)
            return
        quota = self._board.read(QUOTA, now)
        serving = self._board.read(SERVING, now).state
        self.admission.look(Given(quota.state, quota.number if quota.state is not None else 0, serving), now)

    def _stepped(self, planned: list[tuple[Request, int]], tokens: int, cost_s: float) -> None:
        self._stepping = False
        if not self.alive or self.frozen:
            return
        if tokens:
            self.computed_steps += 1
            self._step_s, self._step_tokens = cost_s, tokens
            self._busy_s += cost_s
            self.admission.computed(StepShape(tokens, max(1, len(planned))), cost_s, self.driver.now)
            if self.weights.serving:
                self.compute(planned)
        self.kick()
        if not self._stepping:
            self._report()

    def _report(self) -> None:
        self._steps += 1
        state = GuestState(
            steps=self._steps,
            computed_steps=self.computed_steps,
            quota_number=self.admission.quota_number,
            running=min(len(self.requests), self.admission.seqs_kept),
            waiting=max(0, len(self.requests) - self.admission.seqs_kept),
            kv_blocks_total=LIMITS.kv_blocks,
            step_s=self._step_s,
            step_tokens=self._step_tokens,
            busy_s=self._busy_s,
            slack_s=self.admission.slack_s,
            allowed_tokens=self.admission.allowed.tokens_per_step,
            allowed_seqs=self.admission.allowed.active_seqs,
            open_s=self.admission.open_s,
        )
        self._board.write(GUEST, state, self.driver.now)
