"""A real engine under a plan: each of its steps is written down as what it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rose.errors import EngineError
from rose_executor.profile_plan import Grid, Load, plan
from rose_executor.profile_run import Progress, record_steps
from rose_executor.step_shape import StepShape
from rose_executor.token_route import EngineLost

pytestmark = pytest.mark.engine

ONE = Load(((5, 6, 7, 8, 9, 10, 11),), 4)
WARM = Load(((40, 41), (42, 43, 44)), 3)
OTHER = Load(((20, 21, 22),), 2)


def profiled(rig: Any, name: str, **changes: Any) -> Any:
    return rig.new_engine(name, step_log=rig.folder / f"{name}.steps", **changes)


def record(rig: Any, engine: Any, loads: list[Load], seconds: float = 600.0) -> tuple[Any, list[Progress]]:
    told: list[Progress] = []
    return rig.run(record_steps(engine, [WARM], loads, rig.waits, seconds=seconds, told=told.append)), told


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_steps_of_one_sequence_are_told_token_by_token(rig: Any, asynchronous: bool) -> None:
    engine = profiled(rig, f"profile-{asynchronous}", async_scheduling=asynchronous)
    steps, told = record(rig, engine, [ONE, OTHER])
    assert [step.shape for step in steps] == [
        StepShape(7, 1, 0),
        StepShape(1, 1, 7),
        StepShape(1, 1, 8),
        StepShape(1, 1, 9),
        StepShape(3, 1, 0),
        StepShape(1, 1, 3),
    ]
    assert all(0 < step.seconds < 60 for step in steps)
    assert [(one.done, one.planned) for one in told] == [(0, 2), (1, 2)]
    assert not engine.alive


def test_batches_and_prompts_in_pieces_add_up(rig: Any) -> None:
    """Every token but the last of each answer is computed once: nothing was cached, nothing set back."""
    loads = plan(Grid(16, 128, 4000, 90), seed=3)
    steps, told = record(rig, profiled(rig, "profile-grid"), loads)
    wanted = sum(len(prompt) + load.output_tokens - 1 for load in loads for prompt in load.prompts)
    assert sum(step.shape.tokens for step in steps) == wanted
    assert max(step.shape.seqs for step in steps) > 8
    assert all(step.shape.tokens >= step.shape.seqs for step in steps)
    assert max(step.shape.context_tokens for step in steps) > 500
    assert len(told) == len(loads)


def test_when_the_time_is_over_it_ends_after_the_load(rig: Any) -> None:
    steps, told = record(rig, profiled(rig, "profile-short"), [ONE, OTHER, ONE], seconds=0.0)
    assert len(steps) == 4
    assert len(told) == 1


def test_a_request_that_is_refused_ends_it_and_the_engine(rig: Any) -> None:
    engine = profiled(rig, "profile-refused")
    too_long = Load((tuple([5] * 600), (5, 6)), 4)
    with pytest.raises(EngineError, match="refused"):
        record(rig, engine, [too_long])
    assert not engine.alive


def test_an_engine_that_is_killed_ends_it(rig: Any) -> None:
    engine = profiled(rig, "profile-killed")

    async def killed() -> None:
        running = asyncio.create_task(
            record_steps(engine, [], plan(Grid(16, 512, 4000, 90), 0), rig.waits, seconds=600.0, told=print)
        )
        log = Path(engine.settings.step_log)
        while not running.done() and not (log.exists() and log.stat().st_size):
            await asyncio.sleep(0.005)
        engine.kill()
        with pytest.raises(EngineLost):
            await running

    rig.run(killed())
    assert not engine.alive


def test_an_engine_without_a_log_of_its_steps_is_not_started(rig: Any) -> None:
    engine = rig.new_engine("profile-mute")
    with pytest.raises(EngineError, match="does not write down"):
        record(rig, engine, [ONE])
    assert not engine.alive
