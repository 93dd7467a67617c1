"""What a finished or stopped run has to say: the content of `report.json`.

Invariants
- Writing and reading back gives an equal report.
- A figure that follows from others is derived, never stored twice: success before and after, the gain, the intervals,
  the ledger's gap, the guest's share and the largest parity difference cannot disagree with the rows they come from.
- Rows are in the order in which they happened; the first evaluation is "before", the last one "after".
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, computed_field

from rose.errors import ConfigError
from rose.report.coserving import EngineTokens, Serving, Sharing, lent_share
from rose.report.row import Count, Facts, Fraction, Number, Row, Words

Z_95 = 1.959963984540054  # standard normal quantile of a two-sided 95 % interval


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

    @property
    def wall_s(self) -> float:
        """Seconds of its parts, which follow one another."""
        return sum(part or 0.0 for part in (self.rollout_s, self.train_s, self.publish_s, self.apply_s))


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
    """The whole run. `wall_s` runs from the first line of the run to its last, set-up of the engine included.

    `serving` and `sharing` are there if the run was watched beside a serving engine; `engines` if the rollouts counted
    by engine.
    """

    schema_version: Literal[1] = 1
    run_id: str
    name: Words
    started_at: str
    wall_s: float
    outcome: Literal["finished", "stopped"]
    cause: Words = ""
    machine: Facts = Field(default_factory=dict)
    packages: dict[str, str] = Field(default_factory=dict)
    job: Facts = Field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    steps: tuple[Step, ...] = ()
    ledger: LedgerSummary
    versions_published: Count
    malformed_limit: Fraction = 0.5
    parity_tolerance: float = 1e-4
    alarms: tuple[Alarm, ...] = ()
    engine_restarts: tuple[EngineRestart, ...] = ()
    environment_failures: dict[Words, Count] = Field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    phases: tuple[Phase, ...] = ()
    engines: tuple[EngineTokens, ...] = ()
    serving: Serving | None = None
    sharing: Sharing | None = None

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

    @computed_field  # type: ignore[prop-decorator]
    @property
    def guest_share(self) -> float | None:
        """Share of all sampled tokens that came from lent engines; None if they were not counted by engine."""
        return lent_share(self.engines)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def goodput_tokens_s(self) -> float | None:
        """Trained tokens for each second of a training step, evaluations left out; None before the first step."""
        tokens = sum(step.trained_tokens for step in self.steps)
        spent_s = sum(step.wall_s for step in self.steps)
        return tokens / spent_s if spent_s else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def update_bytes(self) -> int:
        """Bytes of all updates that the steps published."""
        return sum(step.update_bytes for step in self.steps)

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
