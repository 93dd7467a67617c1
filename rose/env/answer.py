"""Checks of what an environment returned. Nonsense is its failure, found here and not three calls later."""

from __future__ import annotations

from numbers import Real
from typing import Any

from rose.env.contract import StepResult
from rose.errors import EnvironmentFailed

MAX_TEXT_CHARS = 1_000_000
"""Far beyond any context; rendering more would stop the event loop for seconds."""

MAX_REWARD = 1e6
"""Either way. A reward far beyond any task's scale is a slip, and would drown every other in a mean, or overflow it."""

_FLAGS = ("terminated", "truncated", "malformed", "success")


def checked_text(value: Any, of: str) -> str:
    """`value` if it is text that can be encoded. Raises EnvironmentFailed, naming what it is the answer `of`."""
    if not isinstance(value, str):
        raise EnvironmentFailed(f"{of} returned {_kind(value)}", expected="text (str)")
    if len(value) > MAX_TEXT_CHARS:
        raise EnvironmentFailed(f"{of} returned {len(value)} characters", expected=f"at most {MAX_TEXT_CHARS}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFailed(f"{of} returned text that is not valid Unicode: {error}") from error
    return value


def checked_step(value: Any, of: str) -> StepResult:
    """`value` if it is a sound StepResult. Raises EnvironmentFailed, naming what it is the answer `of`."""
    if not isinstance(value, StepResult):
        raise EnvironmentFailed(f"{of} returned {_kind(value)}", expected="a StepResult")
    checked_text(value.observation, f"{of}, observation,")
    reward: Any = value.reward  # Foreign: its annotation is a hope.
    if not _is_reward(reward):
        raise EnvironmentFailed(
            f"{of} gave the reward {reward!r}", expected=f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
        )
    for name in _FLAGS:
        if not isinstance(getattr(value, name), bool):
            raise EnvironmentFailed(f"{of} returned {_kind(getattr(value, name))} as {name}", expected="bool")
    return value


def _is_reward(value: Any) -> bool:
    # Compared, not converted: false of NaN, and of an int too large for a float.
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and bool(-MAX_REWARD <= value <= MAX_REWARD)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
