"""Many cores on one virtual clock: each event is for a named part, each action is by one.

Invariants
- What is for a part that is not there is lost, as with a process that has ended: a part that starts anew has a name
  of its own, so timers of its former life reach nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rose.driver.core import After, Core
from rose.driver.virtual import VirtualDriver


@dataclass(frozen=True, slots=True)
class To:
    """An event for one part."""

    part: str
    event: Any


@dataclass(frozen=True, slots=True)
class By:
    """An action of one part."""

    part: str
    action: Any


class Parts:
    """The cores that live now, by name."""

    def __init__(self) -> None:
        self._cores: dict[str, Core[Any, Any]] = {}

    def put(self, name: str, core: Core[Any, Any]) -> None:
        self._cores[name] = core

    def drop(self, name: str) -> None:
        self._cores.pop(name, None)

    def step(self, event: To, now: float) -> Sequence[By | After[To]]:
        core = self._cores.get(event.part)
        if core is None:
            return ()
        return [_addressed(event.part, action) for action in core.step(event.event, now)]


PartsDriver = VirtualDriver[To, By]


def _addressed(part: str, action: Any) -> By | After[To]:
    return After(action.delay_s, To(part, action.event)) if isinstance(action, After) else By(part, action)
