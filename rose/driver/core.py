"""What a pure core is, and the one action that every driver performs itself: a timer.

Invariants
- A core changes only its own state and only inside `step`; it knows the time from `now` alone.
- A timer cannot be taken back. A core gives each a number or a state to recognise one that no longer matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)


class Core(Protocol[E_contra, A_co]):
    """A state machine: one event in, the actions it calls for out, in order."""

    def step(self, event: E_contra, now: float) -> Sequence[A_co]:
        """Take one event at `now`, in seconds on a clock that never goes back."""
        ...


@dataclass(frozen=True, slots=True)
class After(Generic[E]):
    """Give `event` back to the core when `delay_s` seconds have passed."""

    delay_s: float
    event: E
