"""The steps that an engine was seen to make: one line of JSON each, [tokens, seqs, context tokens, seconds].

Invariants
- A line is written whole with one call, so who reads meanwhile sees at most the last one cut short.
- A last line without its end is left out; any other line that is none makes the file a damaged one.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from rose.errors import EngineError
from rose_executor.step_shape import StepShape


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One step, and what it cost in `seconds`."""

    shape: StepShape
    seconds: float


class StepLogWriter:
    """Begins the file anew."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, shape: StepShape, seconds: float) -> None:
        """Raises OSError: an engine that is there to be profiled, and cannot, has no reason to go on."""
        line = json.dumps([shape.tokens, shape.seqs, shape.context_tokens, round(seconds, 9)])
        os.write(self._descriptor, f"{line}\n".encode())


def read_steps(path: Path) -> list[SeenStep]:
    """All that was written so far. Raises EngineError if the file is missing or damaged."""
    try:
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    return [_step(path, number, line) for number, line in enumerate(lines, start=1)]


def _step(path: Path, number: int, line: str) -> SeenStep:
    try:
        tokens, seqs, context_tokens, seconds = json.loads(line)
        return SeenStep(StepShape(int(tokens), int(seqs), int(context_tokens)), float(seconds))
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"line {number}: {error}") from error


def _damaged(path: Path, why: str) -> EngineError:
    return EngineError(f"the engine's steps in {path} cannot be read: {why}", to_do="profile it again")
