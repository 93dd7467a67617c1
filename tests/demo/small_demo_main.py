"""A small demo as a process: `small_demo_main.py JOB OUT [--alone]`. The load is thin, and nothing gives way to it.

The tests' machine has other work, which would starve whatever gives way.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rose.demo.director import run_demo
from rose.demo.load import LoadPlan
from rose.demo.plan import DemoPlan, GuestPlan
from rose.demo.serving_model import ServingShape
from rose.errors import ClusterError, RoseError
from rose.workload.scaling import Scaling


def main(job: str, out: str, *flags: str) -> int:
    part = Scaling(window_s=60.0, rate_rps=2.0, keep_s=6.0, prompt_scale=1 / 32, output_scale=1 / 32)
    plan = DemoPlan(
        Path(job),
        Path(out),
        LoadPlan("azure_2023_conv", part, "5:384"),
        shape=ServingShape(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, head_size=32),
        guest=None if "--alone" in flags else GuestPlan(max_num_seqs=16, kv_cache_gib=0.0625),
        yields=False,
        plain=True,
    )
    return run_demo(plan, lambda line: print(line, flush=True))


if __name__ == "__main__":
    try:
        raise SystemExit(main(*sys.argv[1:]))
    except RoseError as error:
        print(error, flush=True)
        raise SystemExit(3 if isinstance(error, ClusterError) else 1) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
