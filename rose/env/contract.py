"""What an environment is to ROSE: text in, text out, one object per episode.

Invariants
- One object lives through one episode: constructed, reset once, stepped until it is over, closed.
- The constructor only checks its parameters (a wrong one raises ValueError or TypeError); `reset` does the work.
- `(seed, episode_id)` decides everything random: the same pair replays the same episode. The seed is the
  task, shared by all attempts of a group; `episode_id` tells the attempts apart.
- Methods are either plain or async. Plain ones may block: all calls of one episode run on one thread of its own. Async
  ones share one event loop among all episodes, and must not block it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to.

    `reward` is of this step alone, from -1e6 to 1e6, and includes whatever the environment charges for a
    `malformed` action (one that it could not read). `terminated`: the task ended by itself; `truncated`: it was
    cut short, for instance by a limit of turns. `success` is the task's own verdict, false until reached. `info`
    is the environment's own: it does not leave the worker that plays the episode.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    malformed: bool = False
    success: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


@runtime_checkable
class Environment(Protocol):
    """One episode of a task. `close` may be called more than once and at any time after construction."""

    @property
    def system_prompt(self) -> str:
        """Text of the system message; empty for none. Known before `reset`."""
        ...

    def reset(self, seed: int, episode_id: str) -> str | Awaitable[str]:
        """Begin; the first observation."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Act with the text that the policy produced, without its end-of-turn token."""
        ...

    def close(self) -> Awaitable[None] | None: ...


EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of one episode."""

BUILT_IN = {"frozen_lake": "rose.env.frozen_lake:FrozenLake"}
_MEMBERS = ("system_prompt", "reset", "step", "close")


def load_environment(kind: str, params: Mapping[str, Any]) -> EnvironmentFactory:
    """The factory for a built-in name or a "package.module:Class", with `params` as keyword arguments.

    Constructs and drops one environment, so that wrong parameters are found before a run starts.
    Raises ConfigError if the name does not exist, is no environment, or refuses the parameters.
    """
    made = _find_class(kind)
    missing = [name for name in _MEMBERS if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"{kind} is no environment: it lacks {', '.join(missing)}",
            expected="a class with the members of rose.env.contract.Environment",
        )
    arguments = dict(params)
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"parameters of environment {kind}: {error}", expected=f"among: {_parameter_names(made)}"
        ) from error
    try:
        made(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {kind} refuses its parameters: {error}") from error
    return lambda: made(**arguments)


def _find_class(kind: str) -> Callable[..., Environment]:
    module_name, colon, class_name = BUILT_IN.get(kind, kind).partition(":")
    if not colon:
        raise ConfigError(
            f"no environment is called {kind!r}",
            expected=f"one of {', '.join(BUILT_IN)}, or package.module:Class",
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"environment {kind}: cannot import {module_name}: {error}",
            to_do="install its package or put its folder on PYTHONPATH (the job file's own folder is not searched), "
            "or correct the name",
        ) from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if _defines(module_name, value)]
        raise ConfigError(
            f"environment {kind}: {module_name} has no class {class_name!r}",
            expected=f"one of {', '.join(classes) or '(it defines none)'}",
        )
    return cast(Callable[..., Environment], found)


def _defines(module_name: str, value: object) -> bool:
    return inspect.isclass(value) and value.__module__ == module_name


def _parameter_names(made: Callable[..., Environment]) -> str:
    return ", ".join(inspect.signature(made).parameters) or "(it takes none)"
