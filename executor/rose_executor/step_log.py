"""The steps that an engine was seen to make: one line of JSON each, [tokens, seqs, context tokens, seconds].

A guest adds [when it was planned, arrivals that it knew of, KV blocks in use, KV blocks of the quota].

Invariants
- A line is written whole with one call, so who reads meanwhile sees at most the last one cut short.
- A last line without its end is left out; any other line that is none makes the file a damaged one.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rose.errors import EngineError
from rose_executor.step_shape import StepShape


class Plan(NamedTuple):
    """What a guest knew as it planned a step, at `at_s` of the monotonic clock: requests that had come to the serving
    engine, and its own KV blocks in use behind the quota's.
    """

    at_s: float
    arrivals: int
    kv_blocks_used: int
    kv_blocks_quota: int


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One step, and what it cost in `seconds`; `plan` is a guest's."""

    shape: StepShape
    seconds: float
    plan: Plan | None = None


class StepLogWriter:
    """Begins the file anew."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, step: SeenStep) -> None:
        """Raises OSError. An engine that is there to be profiled ends by it; a guest goes on (`guest_trail`)."""
        shape, plan = step.shape, step.plan
        values: list[float] = [shape.tokens, shape.seqs, shape.context_tokens, round(step.seconds, 9)]
        if plan is not None:
            values += [round(plan.at_s, 6), plan.arrivals, plan.kv_blocks_used, plan.kv_blocks_quota]
        line = json.dumps(values)
        os.write(self._descriptor, f"{line}\n".encode())


def read_steps(path: Path, after: int = 0) -> list[SeenStep]:
    """All that was written so far, but for the first `after`. Raises EngineError if the file is missing or damaged."""
    try:
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    return [_step(path, number, line) for number, line in enumerate(lines[after:], start=after + 1)]


def _step(path: Path, number: int, line: str) -> SeenStep:
    try:
        tokens, seqs, context_tokens, seconds, *planned = json.loads(line)
        plan = None
        if planned:
            at_s, *counts = planned
            plan = Plan(float(at_s), *(int(count) for count in counts))
        return SeenStep(StepShape(int(tokens), int(seqs), int(context_tokens)), float(seconds), plan)
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"line {number}: {error}") from error


def _damaged(path: Path, why: str) -> EngineError:
    return EngineError(f"the engine's steps in {path} cannot be read: {why}", to_do="profile it again")
