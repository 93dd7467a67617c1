"""What the terminal view shows of a run, taken from its recorder."""

from __future__ import annotations

from rose.cli.live_view import PartLine, RunView
from rose.trainer.recorder import Recorder

_ETA_STEPS = 5
"""The time left is estimated from this many last steps."""


def view_of(recorder: Recorder) -> RunView:
    """A snapshot of this moment."""
    ledger = recorder.ledger()
    steps = recorder.steps
    return RunView(
        run_id=recorder.run.run_id,
        name=recorder.job.run.name,
        phase=recorder.phase,
        step=len(steps),
        steps_total=recorder.job.train.steps,
        version=recorder.version,
        elapsed_s=recorder.elapsed_s(),
        eta_s=_eta_s(recorder),
        success_history=tuple(step.success for step in steps),
        evaluations=tuple(recorder.evaluations),
        last_step=steps[-1] if steps else None,
        parts=tuple(PartLine(*part) for part in recorder.parts()),
        waits=recorder.waits(),
        accounts=ledger.accounts,
        generated=ledger.generated,
        gap=ledger.gap,
        alarms=tuple(alarm.what for alarm in recorder.alarms),
    )


def _eta_s(recorder: Recorder) -> float | None:
    """Time for the steps left and the last evaluation, None before the first step is done."""
    last = recorder.steps[-_ETA_STEPS:]
    if not last:
        return None
    spent_s = sum(step.wall_s for step in last)
    evaluation_s = recorder.evaluations[-1].wall_s or 0.0 if recorder.evaluations else 0.0
    return spent_s / len(last) * (recorder.job.train.steps - len(recorder.steps)) + evaluation_s
