"""`python -m bench.coserve_without OUT STEPS`: the demo without its guest, same load and cores, for `coserve_demo`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rose.demo.director import run_demo
from rose.demo.plan import DemoPlan, planned_job, shipped_plan


def without_guest(out: Path, steps: int) -> DemoPlan:
    """The shipped plan but for its guest and its length. Writes the job that it needs into `out`."""
    plan = shipped_plan(out, plain=True)
    job = planned_job(plan)
    shorter = job.model_copy(
        update={
            "train": job.train.model_copy(update={"steps": steps}),
            "evaluation": job.evaluation.model_copy(update={"episodes": 1}),
        }
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "without-guest.toml"
    path.write_text(shorter.to_toml(), encoding="utf-8")
    return replace(plan, job=path, guest=None)


if __name__ == "__main__":
    raise SystemExit(run_demo(without_guest(Path(sys.argv[1]), int(sys.argv[2])), print))
