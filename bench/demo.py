"""The product's demo, run as its user runs it: does it learn, does the ledger add up, how long does it take.

The whole process is timed from outside. `set_up_s` is the time from a fresh clone of the committed HEAD, with a new
home and no caches, until rose can be imported.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from bench.child import timed
from bench.registry import Bench, BenchFailed
from bench.result import ROOT, Run, Target
from rose.report.model import RunReport

DEMO_TIMEOUT_S = 1500.0
SET_UP_TIMEOUT_S = 1800.0
CLONE_TIMEOUT_S = 120.0
SET_UP = "set_up_s"
INHERITED = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHON", "TORCH_INDEX_URL", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
INHERITED_PREFIXES = ("PIP_", "UV_", "HTTP_", "HTTPS_", "NO_", "http_", "https_", "no_")
"""How this machine reaches its package index; a new home must not take that away."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--skip-set-up", action="store_true", help="do not measure the set-up from a fresh clone")


def left_out(arguments: Namespace) -> dict[str, str]:
    return {SET_UP: "left out with --skip-set-up"} if arguments.skip_set_up else {}


def measure(arguments: Namespace, index: int) -> Run:
    """One run of the demo; the set-up is measured once, with the first."""
    figures = dict(run_demo(["./dev", "demo", "--plain"]))
    if index == 0 and not arguments.skip_set_up:
        figures[SET_UP] = set_up_from_nothing(ROOT)
    return figures


def run_demo(command: list[str]) -> Run:
    """Run `command --out FOLDER` in an empty folder and read the one report it leaves there.

    Raises BenchFailed if it fails or leaves none.
    """
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        out = Path(folder, "runs")
        wall_s = timed([*command, "--out", str(out)], cwd=ROOT, log=Path(folder, "demo.log"), timeout_s=DEMO_TIMEOUT_S)
        reports = sorted(out.rglob("report.json"))
        if len(reports) != 1:
            raise BenchFailed(f"the demo left {len(reports)} reports", expected="one report.json under --out")
        report = RunReport.from_json(reports[0].read_text(encoding="utf-8"))
    return {
        "success_before": report.success_before,
        "success_after": report.success_after,
        "success_gain": report.success_gain,
        "ledger_gap": report.ledger.gap,
        "ledger_violations": len(report.ledger.violations),
        "versions_published": report.versions_published,
        "parity_max": report.parity_max,
        "evaluation_episodes": min((one.episodes for one in report.evaluations), default=None),
        "wall_s": wall_s,
        "steps": len(report.steps),
        "tokens_generated": report.ledger.generated,
    }


def set_up_from_nothing(repository: Path) -> float:
    """Seconds that `./dev python -c "import rose"` takes in a fresh clone of HEAD, with a new home and no caches."""
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        clone, home = Path(folder, "rose"), Path(folder, "home")
        home.mkdir()
        environment = fresh_environment(home)
        timed(
            ["git", "clone", "--quiet", "--no-hardlinks", str(repository), str(clone)],
            cwd=Path(folder),
            log=Path(folder, "clone.log"),
            timeout_s=CLONE_TIMEOUT_S,
            environment=environment,
        )
        return timed(
            ["./dev", "python", "-c", "import rose"],
            cwd=clone,
            log=Path(folder, "set-up.log"),
            timeout_s=SET_UP_TIMEOUT_S,
            environment=environment,
        )


def fresh_environment(home: Path) -> dict[str, str]:
    """The variables of somebody who has just logged in: a new home, empty caches, the same package index."""
    kept = {
        name: value for name, value in os.environ.items() if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    kept["PATH"] = os.pathsep.join(
        entry for entry in kept.get("PATH", os.defpath).split(os.pathsep) if not entry.startswith(sys.prefix)
    )
    return kept | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PIP_CACHE_DIR": str(home / "cache" / "pip"),
        "UV_CACHE_DIR": str(home / "cache" / "uv"),
    }


BENCH = Bench(
    name="demo",
    summary="the demo as a whole: learning, ledger, parity, wall time, set-up from a fresh clone",
    headline=(
        "success_before",
        "success_after",
        "success_gain",
        "ledger_gap",
        "versions_published",
        "parity_max",
        "evaluation_episodes",
        "wall_s",
        SET_UP,
    ),
    targets=(
        Target("success_gain", ">=", 0.25),
        Target("ledger_gap", "==", 0),
        Target("versions_published", ">=", 10),
        Target("parity_max", "<=", 1e-4),
        Target("evaluation_episodes", ">=", 512),
        Target("wall_s", "<=", 600),
    ),
    measure=measure,
    add_arguments=add_arguments,
    left_out=left_out,
    runs=1,
)
