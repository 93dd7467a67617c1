"""What a report says of the serving engine that lent its idle time, and of who made the rollouts.

Invariants
- Every time is in seconds after the run began; what came before it, such as serving alone, is negative.
- Ratios, shares and the verdict are derived from the rows, never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, computed_field, model_validator

from rose.report.row import Count, Fraction, Number, Row, Words

Measure = Literal["compute", "kv_used", "gate_open", "ttft_p95_ms", "tpot_p95_ms", "rollout_tokens_s", "weight_version"]
"""What a series holds: shares of 1 of the shared device's time (`compute`) and of its KV memory (`kv_used`), the share
of time with the gate open, percentiles of the last seconds, generated tokens each second, and the version served."""


class EngineTokens(Row):
    """What one engine brought to the rollouts, over all its incarnations.

    `requests` are turns sent there, `lost_requests` those that broke off and went on elsewhere or failed.
    """

    engine_id: str
    kind: Literal["dedicated", "lent"]
    tokens_received: Count
    requests: Count
    lost_requests: Count = 0


def lent_share(engines: Sequence[EngineTokens]) -> float | None:
    """Share of all received tokens that came from lent engines; None if there are none."""
    tokens = sum(engine.tokens_received for engine in engines)
    lent = sum(engine.tokens_received for engine in engines if engine.kind == "lent")
    return lent / tokens if tokens else None


class LatencyFigures(Row):
    """What users of the serving engine saw over one stretch of load.

    `outcomes` counts every request that was due by how it ended. `slo_kept` is the share that kept both bounds, of
    those that judge the engine; `ttft_kept` and `tpot_kept` are of each bound alone. `client_lag_p99_ms` is how much
    later than due the client itself sent: no other figure is more exact.
    """

    requests: Count
    outcomes: dict[str, Count]
    tokens: Count
    duration_s: Number
    ttft_p50_ms: Number
    ttft_p95_ms: Number
    ttft_p99_ms: Number
    tpot_p50_ms: Number
    tpot_p95_ms: Number
    tpot_p99_ms: Number
    slo_kept: Fraction | None
    ttft_kept: Fraction | None
    tpot_kept: Fraction | None
    client_lag_p99_ms: Number


class Serving(Row):
    """The serving engine alone and shared, under the same part of a trace; the SLO is alone's p99 times the factors.

    `attribution` is what the trace's licence asks for, `history` what was done to it. `replays` counts how often the
    part was played while shared, which is while the run trained; `around` is what users saw from the run's beginning to
    its end outside of that, while engines and guest started and tasks were evaluated. The SLO counts as kept where at
    least `objective` of the requests of `shared` kept it.
    """

    trace: Words
    attribution: Words
    history: tuple[Words, ...] = ()
    rate_rps: Number
    replays: Count
    slo_ttft_ms: Annotated[float, Field(gt=0)]
    slo_tpot_ms: Annotated[float, Field(gt=0)]
    slo_ttft_factor: float
    slo_tpot_factor: float
    objective: Annotated[float, Field(gt=0, lt=1)] = 0.99
    alone: LatencyFigures
    shared: LatencyFigures
    around: LatencyFigures | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ratios(self) -> dict[str, float | None]:
        """Shared over alone, by percentile; None where one of the two is missing."""
        names = [f"{what}_{level}" for what in ("ttft", "tpot") for level in ("p50", "p95", "p99")]
        return {name: _ratio(getattr(self.shared, f"{name}_ms"), getattr(self.alone, f"{name}_ms")) for name in names}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def slo_met(self) -> bool | None:
        """Whether sharing kept the SLO; None if no request judged it."""
        return None if self.shared.slo_kept is None else self.shared.slo_kept >= self.objective


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


class Series(Row):
    """One figure of one part (`serving`, `guest`, or an engine's id) over time; None where it was not known."""

    what: Measure
    who: str
    at_s: tuple[float, ...]
    values: tuple[Number, ...]

    @model_validator(mode="after")
    def _of_one_length(self) -> Series:
        if len(self.at_s) != len(self.values) or any(b <= a for a, b in zip(self.at_s, self.at_s[1:], strict=False)):
            raise ValueError(f"{self.what} of {self.who}: one value for each of increasing times")
        return self


class Sharing(Row):
    """How the serving engine's device was shared.

    `partition` names what keeps the guest below serving, and its cost. `window_s` is what the latency percentiles of
    the series look back. The counts are the executor's: how often the guest was started again, lost KV to serving
    (`preemptions`), had too little of it for a single request (`starvations`); `fetched_bytes` came in as weights.
    """

    partition: Words
    window_s: float = 15.0
    series: tuple[Series, ...] = ()
    guest_restarts: Count = 0
    preemptions: Count = 0
    starvations: Count = 0
    fetched_bytes: Count = 0

    def of(self, what: Measure) -> dict[str, Series]:
        """The series of one figure by who they are of, in their order."""
        return {series.who: series for series in self.series if series.what == what}
