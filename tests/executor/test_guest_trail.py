"""A guest's own record of its steps, and a disk that takes no more of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rose_executor.guest_trail import GuestTrail
from rose_executor.step_log import Plan, SeenStep, read_steps
from rose_executor.step_shape import StepShape

PLAN, SHAPE = Plan(1.5, 3, 10, 20), StepShape(4, 2, 100)


def test_each_step_is_written_with_its_plan(tmp_path: Path) -> None:
    trail = GuestTrail(tmp_path / "steps")
    trail.planned(*PLAN)
    trail.ended(SHAPE, 0.25)
    assert read_steps(tmp_path / "steps") == [SeenStep(SHAPE, 0.25, PLAN)]


def test_a_full_disk_ends_the_record_and_not_the_guest(caplog: pytest.LogCaptureFixture) -> None:
    trail = GuestTrail(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            trail.planned(*PLAN)
            trail.ended(SHAPE, 0.25)
    (line,) = caplog.messages
    assert line == "the guest's steps are written down no more: [Errno 28] No space left on device"


def test_without_a_file_nothing_is_kept() -> None:
    trail = GuestTrail(None)
    trail.planned(*PLAN)
    trail.ended(SHAPE, 0.25)
