"""The numbers behind the charts, in words, as tables narrow enough to be printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rose.report.model import Evaluation, RunReport, Step
from rose.report.words import percent, seconds, tiny

R = TypeVar("R")
Column = tuple[str, Callable[[R], str]]


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    heads: list[str]
    rows: list[list[str]]


def number_tables(report: RunReport) -> list[Table]:
    """Evaluations and steps; a table without rows is left out."""
    made = [
        _table("Evaluations", report.evaluations, EVALUATION),
        _table("Steps: episodes and tokens", report.steps, EPISODES),
        _table("Steps: time and weights", report.steps, TIMES),
        _table("Steps: update", report.steps, UPDATE),
    ]
    return [table for table in made if table.rows]


def _table(title: str, rows: Sequence[R], columns: Sequence[Column[R]]) -> Table:
    return Table(title, [head for head, _ in columns], [[read(row) for _, read in columns] for row in rows])


def _fixed(value: float | None, decimals: int) -> str:
    return "–" if value is None else f"{value:.{decimals}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _tiny(value: float | None) -> str:
    return "–" if value is None else tiny(value)


EVALUATION: list[Column[Evaluation]] = [
    ("After step", lambda row: str(row.step)),
    ("Version", lambda row: str(row.version)),
    ("Episodes", lambda row: str(row.episodes)),
    ("Success", lambda row: f"{100 * row.success:.1f} %"),
    ("95 % interval", lambda row: f"{percent(row.success_ci95[0])} to {percent(row.success_ci95[1])}"),
    ("Reward", lambda row: _fixed(row.reward_mean, 3)),
    ("Malformed", lambda row: percent(row.malformed_fraction)),
    ("Turns", lambda row: _fixed(row.turns_mean, 1)),
    ("Wall", lambda row: seconds(row.wall_s)),
]
EPISODES: list[Column[Step]] = [
    ("Step", lambda row: str(row.step)),
    ("Success", lambda row: percent(row.success)),
    ("Reward", lambda row: _fixed(row.reward_mean, 3)),
    ("Turns", lambda row: _fixed(row.turns_mean, 1)),
    ("Malformed", lambda row: percent(row.malformed_fraction)),
    ("Groups used", lambda row: str(row.groups_used)),
    ("Without variance", lambda row: str(row.groups_zero_variance)),
    ("Sampled", lambda row: f"{row.output_tokens:,}"),
    ("Context", lambda row: f"{row.context_tokens:,}"),
    ("Trained", lambda row: f"{row.trained_tokens:,}"),
    ("Episodes ended", lambda row: ", ".join(f"{outcome} {count:,}" for outcome, count in row.outcomes.items())),
]
TIMES: list[Column[Step]] = [
    ("Step", lambda row: str(row.step)),
    ("Rollout", lambda row: seconds(row.rollout_s)),
    ("Train", lambda row: seconds(row.train_s)),
    ("Publish", lambda row: seconds(row.publish_s)),
    ("Apply", lambda row: seconds(row.apply_s)),
    ("Pause, ms", lambda row: _fixed(row.pause_ms, 0)),
    ("Version", lambda row: str(row.version)),
    ("Changed", lambda row: _percent(row.changed_fraction)),
    ("Update, MB", lambda row: _fixed(row.update_bytes / 1e6, 2)),
    ("Update, % of model", lambda row: _fixed(100 * row.update_bytes / max(row.model_bytes, 1), 1)),
    ("Parity", lambda row: _tiny(row.parity_max)),
    ("Mismatch", lambda row: _tiny(row.logprob_mismatch_max)),
]
UPDATE: list[Column[Step]] = [
    ("Step", lambda row: str(row.step)),
    ("Learning rate", lambda row: _tiny(row.learning_rate)),
    ("Loss", lambda row: _fixed(row.loss, 4)),
    ("Entropy", lambda row: _fixed(row.entropy, 3)),
    ("KL", lambda row: _tiny(row.kl)),
    ("KL from the start", lambda row: _tiny(row.reference_kl)),
    ("Gradient norm", lambda row: _fixed(row.grad_norm, 3)),
    ("Clipped", lambda row: _percent(row.clip_fraction)),
]
