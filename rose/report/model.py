"""What a finished or stopped run has to say: the content of `report.json`.

Invariants
- Writing and reading back gives an equal report. Numbers that are not finite become null on the way in, so the file
  is valid JSON and no reader meets NaN; text is what UTF-8 can hold.
- A figure that follows from others is derived, never stored twice: success before and after, the gain, the intervals,
  the ledger's gap and the largest parity difference cannot disagree with the rows they come from.
- Rows are in the order in which they happened; the first evaluation is "before", the last one "after".
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, computed_field, model_validator

from rose.errors import ConfigError

Z_95 = 1.959963984540054  # standard normal quantile of a two-sided 95 % interval


def _plain(value: Any) -> Any:
    """The same value as JSON and UTF-8 can hold it: None for a number that is not finite, "?" for half a character."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


Number = Annotated[float | None, BeforeValidator(_plain)]
"""A measured number; None where it was not measured or not finite."""
Facts = Annotated[dict[str, JsonValue], BeforeValidator(_plain)]
"""Nested facts as JSON holds them."""
Count = Annotated[int, Field(ge=0)]
Words = Annotated[str, BeforeValidator(_plain)]
"""Text from outside: environments, models, errors."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95 % interval of a success rate (Wilson 1927, score interval), both ends within 0 and 1.

    Raises ValueError unless 0 <= successes <= trials and trials > 0.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes of {trials} trials")
    rate, z2 = successes / trials, Z_95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


class Row(BaseModel):
    """Base of everything in a report: unknown fields are refused, derived ones dropped when a file is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_derived(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in cls.model_computed_fields}


class Evaluation(Row):
    """Held-out episodes, sampled from one weight version after `step` training steps (0: before any).

    `failed` more episodes were lost to their environment or engine; they say nothing about the policy and are in no
    figure here.
    """

    step: Count
    version: Count
    episodes: Annotated[int, Field(gt=0)]
    failed: Count = 0
    success: Fraction
    reward_mean: Number
    malformed_fraction: Fraction
    turns_mean: Number
    wall_s: Number

    @computed_field  # type: ignore[prop-decorator]
    @property
    def success_ci95(self) -> tuple[float, float]:
        """Wilson interval of `success` over `episodes`."""
        return wilson_interval(self.success * self.episodes, self.episodes)


class Step(Row):
    """One training step: a rollout, an update, a new version. `version` is the one that the step published.

    `changed_fraction` is the share of bf16 weights that differ from the version before. `pause_ms` is how long the
    engine sampled nothing while it changed version. `parity_max` is the largest difference of a log-prob between the
    live engine and a fresh one (nats), None where it was not checked; `logprob_mismatch_max` that between trainer and
    engine on the sampled tokens. `reference_kl` is how far the policy that sampled had moved from the first one (nats
    per token, estimated).
    """

    step: Annotated[int, Field(ge=1)]
    version: Count
    success: Fraction
    reward_mean: Number
    turns_mean: Number
    malformed_fraction: Fraction
    groups_used: Count
    groups_zero_variance: Count
    outcomes: dict[str, Count]
    output_tokens: Count
    context_tokens: Count
    trained_tokens: Count
    rollout_s: Number
    train_s: Number
    publish_s: Number
    apply_s: Number
    pause_ms: Number
    parity_max: Number = None
    logprob_mismatch_max: Number
    loss: Number
    entropy: Number
    grad_norm: Number
    clip_fraction: Number
    kl: Number = None
    reference_kl: Number = None
    learning_rate: Number
    changed_fraction: Number
    update_bytes: Count
    model_bytes: Count


class LedgerSummary(Row):
    """Where every generated token went. `generated` is the engines' own count, never a sum of the accounts."""

    accounts: dict[str, int]
    generated: Count
    violations: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gap(self) -> int:
        """Generated tokens that no account holds; anything but 0 is a bug."""
        return self.generated - sum(self.accounts.values())


class Alarm(Row):
    version: Count
    what: Words


class EngineRestart(Row):
    """`at_s` seconds after the run began."""

    at_s: float
    engine_id: str
    cause: Words


class Message(Row):
    role: Words
    text: Words


class Sample(Row):
    """One evaluated trajectory in words; a before and an after sample of one `task_seed` are shown side by side."""

    when: Literal["before", "after"]
    task_seed: int
    success: bool
    reward: Number
    transcript: tuple[Message, ...]


class Phase(Row):
    """A stretch of the run, in seconds after it began. The same name may come many times."""

    name: str
    start_s: float
    end_s: float


class RunReport(Row):
    """The whole run. `wall_s` runs from the first line of the run to its last, set-up of the engine included."""

    schema_version: Literal[1] = 1
    run_id: str
    name: Words
    started_at: str
    wall_s: float
    outcome: Literal["finished", "stopped"]
    cause: Words = ""
    machine: Facts = {}
    packages: dict[str, str] = {}
    job: Facts = {}
    evaluations: tuple[Evaluation, ...] = ()
    steps: tuple[Step, ...] = ()
    ledger: LedgerSummary
    versions_published: Count
    malformed_limit: Fraction = 0.5
    parity_tolerance: float = 1e-4
    alarms: tuple[Alarm, ...] = ()
    engine_restarts: tuple[EngineRestart, ...] = ()
    environment_failures: dict[Words, Count] = {}
    samples: tuple[Sample, ...] = ()
    phases: tuple[Phase, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def success_before(self) -> float | None:
        """Held-out success of the first evaluation, None if there was none."""
        return self.evaluations[0].success if self.evaluations else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def success_after(self) -> float | None:
        """Held-out success of the last evaluation, None unless there were two."""
        return self.evaluations[-1].success if len(self.evaluations) > 1 else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def success_gain(self) -> float | None:
        before, after = self.success_before, self.success_after
        return None if before is None or after is None else after - before

    @computed_field  # type: ignore[prop-decorator]
    @property
    def parity_max(self) -> float | None:
        """Largest difference over all checked steps (nats), None if none was checked."""
        return max((step.parity_max for step in self.steps if step.parity_max is not None), default=None)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> RunReport:
        """Read what `to_json` wrote. Raises ConfigError for anything else."""
        try:
            return RunReport.model_validate_json(text)
        except ValueError as error:
            raise ConfigError(
                f"not a run report: {error}",
                expected="a report.json of schema version 1",
                to_do="make it again with this version of ROSE",
            ) from error
