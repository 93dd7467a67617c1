"""A thousand steps of a real guest under quotas, priorities, aborts and pauses at random, with both schedulers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rose_executor.launcher import Command

STEPS = 1000
SEEDS = int(os.environ.get("ROSE_FUZZ_SEEDS", "1"))
"""How many runs: look for new ones with ROSE_FUZZ_SEEDS=50."""


@pytest.mark.engine
@pytest.mark.each_vllm
@pytest.mark.timeout(120 + 60 * SEEDS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_whatever_happens_outputs_are_the_undisturbed_and_nothing_is_left(
    rig: Any, tmp_path: Path, asynchronous: bool
) -> None:
    """Each quota is in force in the very schedule that takes it, steps overlap or not."""
    question, answer, log = tmp_path / "question", tmp_path / "answer", tmp_path / "log"
    asked = {"model": str(rig.model), "board": str(tmp_path / "board"), "asynchronous": asynchronous}
    question.write_text(json.dumps({**asked, "seeds": list(range(SEEDS)), "steps": STEPS}))

    async def ask() -> None:
        command = Command("guest_fuzz_main", (str(question), str(answer)), log, tmp_path)
        child = await rig.warm.launch(command)
        assert await child.wait() == 0, log.read_text()[-3000:]

    rig.run(ask())
    for seed, outcome in enumerate(json.loads(answer.read_text())):
        assert (outcome["wrong"], outcome["lost"]) == ([], []), f"seed {seed}"
        assert (outcome["used_blocks"], outcome["emptied"]) == (0, True), f"seed {seed}"
        # It did happen.
        assert outcome["preempted"] > 10, f"seed {seed}: {outcome}"
        assert outcome["whole"] > 20, f"seed {seed}: {outcome}"
        assert outcome["cut_short"] > 0, f"seed {seed}: {outcome}"
        assert outcome["never"] == [], f"seed {seed}: {outcome}"
