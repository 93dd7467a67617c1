"""From an engine's steps to its profile, and how well such a profile tells steps that it has not seen."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rose.errors import EngineError
from rose_executor.step_log import SeenStep
from rose_executor.step_profile import StepProfile

STEPS_MIN = 100
_FOLDS = 5
_MANY = 0.9


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Relative errors of steps that were held out: |seen / expected - 1|.

    `mean`; `median`, which half of them do not exceed, and `upper`, which nine in ten do not. `slower` is what one in a
    hundred took longer than, as a multiple of what was expected.
    """

    mean: float
    median: float
    upper: float
    slower: float


def fitted(steps: Sequence[SeenStep], seed: int) -> StepProfile:
    """What all of them teach. Raises EngineError if they are too few to."""
    if len(steps) < STEPS_MIN:
        raise EngineError(
            f"the engine made {len(steps)} steps in its time",
            expected=f"{STEPS_MIN} or more",
            to_do="give it more time with --seconds",
        )
    return _taught(_shuffled(steps, seed))


def held_out(steps: Sequence[SeenStep], seed: int) -> HeldOut:
    """Each fifth of the steps, told by a profile that has learnt the other four."""
    steps = _shuffled(steps, seed)
    ratios: list[float] = []
    for fold in range(_FOLDS):
        profile = _taught([step for at, step in enumerate(steps) if at % _FOLDS != fold])
        ratios += [step.seconds / profile.seconds(step.shape) for step in steps[fold::_FOLDS]]
    missed = sorted(abs(ratio - 1) for ratio in ratios)
    return HeldOut(
        mean=statistics.fmean(missed),
        median=statistics.median(missed),
        upper=missed[int(_MANY * len(missed))],
        slower=sorted(ratios)[int(0.99 * len(ratios))],
    )


def _taught(steps: Sequence[SeenStep]) -> StepProfile:
    profile = StepProfile()
    for at, step in enumerate(steps):
        profile.saw(step.shape, step.seconds, float(at))
    # As an executor begins with it: the margin is for what is going on, not for what is kept.
    return StepProfile(profile.state())


def _shuffled(steps: Sequence[SeenStep], seed: int) -> list[SeenStep]:
    """In no order: the profile weighs late steps more than early ones, and a load's steps are alike."""
    shuffled = list(steps)
    random.Random(seed).shuffle(shuffled)
    return shuffled
