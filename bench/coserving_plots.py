"""The pictures of `coserving`: one for each figure that has a target, all phases in it, every round a dot.

A bar is of all rounds together; the last of the runs has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.coserving_phases import PHASES
from bench.result import Run

_SHOWN: Mapping[str, tuple[str, float | None, bool]] = {
    "ttft_p99_ratio": ("TTFT p99, serving alone = 1", 1.10, True),
    "tpot_p99_ratio": ("TPOT p99, serving alone = 1", 1.10, True),
    "guest_tok_s_fraction": ("guest's tokens per second, naive sharing = 1", 0.85, False),
    "slo_attainment": ("share of requests within the SLO", 0.99, False),
}
"""Figure: its title, its target, and whether less is better."""


def draw(runs: Sequence[Run], results: Path) -> list[Path]:
    """Writes `results` without its suffix and with `-FIGURE.png`; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    files = []
    for figure, (title, target, less) in _SHOWN.items():
        path = results.with_name(f"{results.stem}-{figure}.png")
        _draw(runs, figure, title, target, less, path)
        files.append(path)
    return files


def _draw(runs: Sequence[Run], figure: str, title: str, target: float | None, less: bool, path: Path) -> None:
    from matplotlib import pyplot

    found = {phase.name: runs[-1].get(f"{figure}_{phase.name}") for phase in PHASES}
    named = {name: value for name, value in found.items() if value is not None}
    chart, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    at = range(len(named))
    axes.bar(at, list(named.values()), color="#9db8d9", zorder=1)
    for place, name in zip(at, named, strict=True):
        values = [value for run in runs if (value := run.get(f"round_{figure}_{name}")) is not None]
        axes.plot([place] * len(values), values, "o", color="#1f3b5c", markersize=3, zorder=2)
    if target is not None:
        axes.axhline(target, color="#b3261e", linewidth=1, zorder=3)
        bound = f"target {'≤' if less else '≥'} {target:g}"
        axes.annotate(bound, (len(named) - 0.45, target), color="#b3261e", ha="right", va="bottom", fontsize=8)
    axes.set_xticks(list(at), [name.replace("_", " ") for name in named])
    axes.set_title(f"{title} (bars: all {len(runs)} rounds together, dots: each)", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    chart.savefig(path, dpi=110)
    pyplot.close(chart)
