"""Co-serving as the demo shows it: what the users of serving see, what the guest brings, and what that is worth.

Each run is a pair, side by side in time: the demo as its user runs it, and the same demo without its guest, under the
same load on the same cores. Goodput is compared over the same first steps of both.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from datetime import datetime
from pathlib import Path
from statistics import median

from bench.child import timed
from bench.cpu_watch import CpuWatch, used
from bench.registry import Bench, BenchFailed
from bench.result import ROOT, Run, Target
from rose.report.coserving import Serving
from rose.report.model import RunReport

DEMO_TIMEOUT_S = 1500.0
ROLLOUT_PHASE = "rollout"
WARM_STEPS = 1
"""The first steps pay for what is first done then, and in the demo the guest may not have come yet."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=8, metavar="N", help="steps of the run without a guest (%(default)s)"
    )
    parser.add_argument("--skip-without", action="store_true", help="do not run without a guest")


def left_out(arguments: Namespace) -> dict[str, str]:
    return {"goodput_ratio": "left out with --skip-without"} if arguments.skip_without else {}


def measure(arguments: Namespace, index: int) -> Run:
    """One pair; every other one begins without the guest, so that neither always has the warmer machine."""
    sides = {
        "with": lambda: reported(["./dev", "demo", "--plain", "--out"], []),
        "without": lambda: reported([sys.executable, "-m", "bench.coserve_without"], [str(arguments.steps)]),
    }
    order = ["with"] if arguments.skip_without else ["with", "without"][:: -1 if index % 2 else 1]
    found = {side: sides[side]() for side in order}
    report, wall_s, cores = found["with"]
    figures = {**figures_of(report, wall_s), **cores_of("with", cores)}
    if not arguments.skip_without:
        bare, _, cores = found["without"]
        figures |= cores_of("without", cores)
        steps = range(WARM_STEPS + 1, min(len(report.steps), len(bare.steps)) + 1)
        ours, theirs = goodput(report, steps), goodput(bare, steps)
        figures |= {"goodput_with": ours, "goodput_without": theirs, "goodput_ratio": ours / theirs}
        figures |= {**step_parts("with", report, steps), **step_parts("without", bare, steps)}
    return figures


def reported(command: list[str], arguments: list[str]) -> tuple[RunReport, float, dict[str, float]]:
    """Run `command FOLDER arguments`; the one report that it leaves there, how long it took, who used which cores.

    The cores are averages over the rollouts of its steps. Raises BenchFailed if it fails or leaves no report.
    """
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        out = Path(folder, "runs")
        with CpuWatch() as watch:
            wall_s = timed(
                [*command, str(out), *arguments], cwd=ROOT, log=Path(folder, "demo.log"), timeout_s=DEMO_TIMEOUT_S
            )
        reports = sorted(out.rglob("report.json"))
        if len(reports) != 1:
            raise BenchFailed(f"the demo left {len(reports)} reports", expected="one report.json below its folder")
        report = RunReport.from_json(reports[0].read_text(encoding="utf-8"))
        return report, wall_s, used(watch.readings, rollouts(report))


def rollouts(report: RunReport) -> list[tuple[float, float]]:
    """From when to when its steps sampled, of the clock on the wall."""
    began = datetime.fromisoformat(report.started_at).timestamp()
    return [(began + phase.start_s, began + phase.end_s) for phase in report.phases if phase.name == ROLLOUT_PHASE]


def cores_of(side: str, cores: dict[str, float]) -> Run:
    return {f"cores_{side}_{part.replace(' ', '_')}": used for part, used in sorted(cores.items())}


def figures_of(report: RunReport, wall_s: float) -> Run:
    """What a demo with its guest shows. Raises BenchFailed if its report says nothing of serving."""
    serving = report.serving
    if serving is None:
        raise BenchFailed("the demo's report says nothing of serving", to_do="see its log")
    return {
        **_of_serving(serving),
        "guest_share": report.guest_share,
        "success_before": report.success_before,
        "success_after": report.success_after,
        "success_gain": report.success_gain,
        "ledger_gap": report.ledger.gap,
        "ledger_violations": len(report.ledger.violations),
        "guest_restarts": report.sharing.guest_restarts if report.sharing is not None else None,
        "versions_published": report.versions_published,
        "parity_max": report.parity_max,
        "lost_requests": sum(engine.lost_requests for engine in report.engines),
        "steps": len(report.steps),
        "run_s": report.wall_s,
        "wall_s": wall_s,
    }


def _of_serving(serving: Serving) -> Run:
    return {
        "serving_ttft_p95_ratio": serving.ratios["ttft_p95"],
        "serving_tpot_p95_ratio": serving.ratios["tpot_p95"],
        "serving_ttft_p99_ratio": serving.ratios["ttft_p99"],
        "serving_tpot_p99_ratio": serving.ratios["tpot_p99"],
        "serving_ttft_p95_alone_ms": serving.alone.ttft_p95_ms,
        "serving_tpot_p95_alone_ms": serving.alone.tpot_p95_ms,
        "slo_attainment": serving.shared.slo_kept,
        "slo_attainment_alone": serving.alone.slo_kept,
        "slo_attainment_around": None if serving.around is None else serving.around.slo_kept,
        "serving_requests": serving.shared.requests,
        "client_lag_p99_ms": serving.shared.client_lag_p99_ms,
    }


def goodput(report: RunReport, steps: range) -> float:
    """Trained tokens per second over these steps. Raises BenchFailed if there are none, or nothing was trained."""
    chosen = [step for step in report.steps if step.step in steps]
    tokens, took_s = sum(step.trained_tokens for step in chosen), sum(step.wall_s for step in chosen)
    if not tokens or not took_s:
        raise BenchFailed(f"no goodput of steps {steps.start} to {steps.stop - 1}", expected="steps that trained")
    return tokens / took_s


def step_parts(side: str, report: RunReport, steps: range) -> Run:
    """What one of these steps spent on sampling and on training, in seconds: the medians."""
    chosen = [step for step in report.steps if step.step in steps]
    return {
        f"rollout_s_{side}": median(step.rollout_s or 0.0 for step in chosen),
        f"train_s_{side}": median(step.train_s or 0.0 for step in chosen),
    }


BENCH = Bench(
    name="coserve_demo",
    summary="the co-serving demo: serving alone and shared, the guest's share, goodput with and without it",
    headline=(
        *("serving_ttft_p95_ratio", "serving_tpot_p95_ratio", "slo_attainment", "guest_share", "goodput_ratio"),
        *("success_gain", "ledger_gap", "parity_max", "wall_s"),
    ),
    targets=(
        Target("serving_ttft_p95_ratio", "<=", 1.15),
        Target("serving_tpot_p95_ratio", "<=", 1.15),
        Target("slo_attainment", ">=", 0.99),
        Target("guest_share", ">=", 0.2),
        Target("goodput_ratio", ">=", 1.1),
        Target("success_gain", ">=", 0.25),
        Target("ledger_gap", "==", 0),
        Target("parity_max", "<=", 1e-4),
        Target("wall_s", "<=", 600),
    ),
    measure=measure,
    add_arguments=add_arguments,
    left_out=left_out,
    runs=3,
)
