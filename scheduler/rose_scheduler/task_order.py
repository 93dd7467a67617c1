"""In which order turns that wait are placed: continuous task batching of TideRL (arXiv 2608.10402). Pure.

A task is a trajectory. Its paper sums weights, which it does not give, of four things: evaluation first, then groups
near completion, then tasks that have begun, then long contexts. Said in that order it is lexicographic, which is the
default here; `Weights` sums them. Of equal ones those of open groups come before those of new ones, and those of groups
of which a first turn has told how much their turns bring (the group's *probe*) before those that wait for it; then they
go in the order in which their groups were opened, and then as they came.

Invariants
- Keys compare the same way at any later time: what ages does so alike for all, so that a line stays in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Key = tuple[float, ...]
"""Lower is sooner. All keys of one order have one length."""


@dataclass(frozen=True, slots=True)
class Task:
    """What counts of a task that waits since `asked_s`. `completion` is the share of its group that is over, in [0, 1].

    A group is `open` once one of its tasks has begun, and `probed` once a turn of it has ended; a task is `active` once
    itself has begun. `group_order` is lower for a
    group that opened, or if it is not open, was asked for, earlier.
    """

    evaluation: bool
    completion: float
    probed: bool
    open: bool
    active: bool
    context_tokens: int
    group_order: int
    asked_s: float


TaskOrder = Callable[[Task], Key]


def lexicographic(task: Task) -> Key:
    """Evaluation, completion, active, context: what comes first decides, unless it is equal."""
    return (
        not task.evaluation,
        -task.completion,
        not task.active,
        -task.context_tokens if task.active else 0,
        *_of_group(task),
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """The sum, and beside it what waiting weighs. Raises ValueError unless all are finite and none is below 0.

    With `context` 1, `active` 2, `completion` 4 G and `evaluation` 8 G, and G the largest group of the run, the sum
    orders as the lexicographic order does. `context_tokens_max` is what a context has at most, `waited` what one second
    of waiting is worth.
    """

    evaluation: float
    completion: float
    active: float
    context: float
    context_tokens_max: int
    waited: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.evaluation, self.completion, self.active, self.context, self.waited)
        if not all(0 <= part < float("inf") for part in parts) or self.context_tokens_max < 1:
            raise ValueError(f"weights of tasks are 0 or more, and a context has a token: {self}")

    @classmethod
    def as_lexicographic(cls, group_max: int, context_tokens_max: int) -> Weights:
        return cls(8.0 * group_max, 4.0 * group_max, 2.0, 1.0, context_tokens_max)

    def __call__(self, task: Task) -> Key:
        weight = (
            self.evaluation * task.evaluation
            + self.completion * task.completion
            + self.active * task.active
            + self.context * min(1.0, task.context_tokens / self.context_tokens_max)
            - self.waited * task.asked_s
        )
        return (-weight, *_of_group(task))


def _of_group(task: Task) -> Key:
    return (not task.open, not task.probed, task.group_order)
