"""What each chart of the report shows: data and words, without any drawing.

A chart is told by its title, one sentence and its units; a series with nothing measured is left out, and a chart
without series is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rose.report.model import RunReport, Step
from rose.report.words import tiny

Kind = Literal["line", "steps", "stack", "area"]
"""`stack` is of bars and `area` of stretches, both on top of one another; `steps` holds a value until the next."""


@dataclass(frozen=True, slots=True)
class Line:
    """`colour` names a colour of the page; `low` and `high` are the ends of an error bar at each x."""

    label: str
    colour: str
    values: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """A line across the chart."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """`unit` is "%" (values are fractions), "s", "ms", "nats", "tokens/s" or "" for a number without one.

    With `x_time`, x is in seconds after the run began.
    """

    chart_id: str
    title: str
    says: str
    x_label: str
    unit: str
    x: list[int] | list[float]
    series: list[Line]
    kind: Kind = "line"
    scale: Literal["linear", "log"] = "linear"
    top: float | None = None
    limit: Limit | None = None
    wide: bool = False
    x_time: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def success_chart(report: RunReport) -> Chart | None:
    """Training and held-out success over the number of updates that the sampling policy had seen."""
    training = {step.step - 1: step.success for step in report.steps}
    held_out = {evaluation.step: evaluation for evaluation in report.evaluations}
    x = sorted(training.keys() | held_out.keys())
    if not x:
        return None
    at = [held_out.get(step) for step in x]
    series = [
        Line("training tasks", "blue", [training.get(step) for step in x]),
        Line(
            "held-out tasks, 95 % interval",
            "vermilion",
            [None if one is None else one.success for one in at],
            [None if one is None else one.success_ci95[0] for one in at],
            [None if one is None else one.success_ci95[1] for one in at],
        ),
    ]
    says = "Share of episodes that reach the goal. Held-out tasks are never trained on."
    series = [one for one in series if any(value is not None for value in one.values)]
    return Chart("success", "Success rate", says, "updates done", "%", x, series, top=1.0, wide=True)


def time_chart(report: RunReport) -> Chart | None:
    if not report.steps:
        return None
    activities: list[tuple[str, str, Callable[[Step], float | None]]] = [
        ("rollout", "blue", lambda step: step.rollout_s),
        ("train", "orange", lambda step: step.train_s),
        ("publish", "green", lambda step: step.publish_s),
        ("apply", "purple", lambda step: step.apply_s),
    ]
    series = [Line(label, colour, [read(step) for step in report.steps]) for label, colour, read in activities]
    says = "How long each training step took, and on what."
    x = [step.step for step in report.steps]
    return Chart("time", "Time per step", says, "step", "s", x, series, kind="stack", wide=True)


def step_charts(report: RunReport) -> list[Chart]:
    """The small charts: one figure each, over the steps."""
    made = [*_version_charts(report), *_update_charts(report)]
    return [chart for chart in made if chart is not None]


def _version_charts(report: RunReport) -> list[Chart | None]:
    """What the new versions are and do."""
    limit = report.malformed_limit
    parity = report.parity_tolerance
    return [
        _over_steps(
            report.steps,
            "changed",
            "Weights changed",
            "Share of bf16 weights that differ from the version before.",
            "%",
            lambda step: step.changed_fraction,
        ),
        _over_steps(
            report.steps,
            "malformed",
            "Malformed actions",
            "Share of actions that the environment could not read.",
            "%",
            lambda step: step.malformed_fraction,
            limit=Limit(limit, f"alarm above {100 * limit:.0f} %"),
        ),
        _over_steps(
            report.steps,
            "parity",
            "Live engine against a fresh one",
            "Largest difference of a log-prob on fixed probes.",
            "nats",
            lambda step: step.parity_max,
            limit=Limit(parity, f"limit {tiny(parity)}"),
            scale="log",
        ),
        _over_steps(
            report.steps,
            "mismatch",
            "Trainer against engine",
            "Largest difference of a log-prob on the sampled tokens. They differ because the trainer computes with its "
            "float32 weights and the engine with the same weights rounded to bf16; rare tokens feel it most.",
            "nats",
            lambda step: step.logprob_mismatch_max,
        ),
        _over_steps(
            report.steps,
            "pause",
            "Pause for new weights",
            "How long the engine sampled nothing while it changed version.",
            "ms",
            lambda step: step.pause_ms,
        ),
    ]


def _update_charts(report: RunReport) -> list[Chart | None]:
    """How the policy changes."""
    return [
        _over_steps(
            report.steps,
            "entropy",
            "Entropy",
            "Mean entropy of the policy per sampled token.",
            "nats",
            lambda step: step.entropy,
        ),
        _over_steps(
            report.steps,
            "kl",
            "KL divergence",
            "Estimate, from the policy that sampled.",
            "nats",
            lambda step: step.kl,
        ),
        _over_steps(
            report.steps,
            "reference-kl",
            "Distance from the start",
            "KL divergence of the policy that sampled from the one that training began with, estimated.",
            "nats",
            lambda step: step.reference_kl,
        ),
        _over_steps(
            report.steps,
            "grad",
            "Gradient norm",
            "Before it is clipped.",
            "",
            lambda step: step.grad_norm,
        ),
        _over_steps(
            report.steps,
            "clip",
            "Clipped tokens",
            "Share of trained tokens whose ratio was clipped.",
            "%",
            lambda step: step.clip_fraction,
        ),
    ]


def _over_steps(
    steps: Sequence[Step],
    chart_id: str,
    title: str,
    says: str,
    unit: str,
    read: Callable[[Step], float | None],
    *,
    limit: Limit | None = None,
    scale: Literal["linear", "log"] = "linear",
) -> Chart | None:
    values = [read(step) for step in steps]
    if scale == "log":
        values = [value if value is not None and value > 0 else None for value in values]
    if all(value is None for value in values):
        return None
    series = [Line("value", "blue", values)]
    x = [step.step for step in steps]
    return Chart(chart_id, title, says, "step", unit, x, series, scale=scale, limit=limit)
