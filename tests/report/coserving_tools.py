"""A made-up stretch of co-serving in the shape of a real one: a burst every two minutes, the guest yielding to it."""

from __future__ import annotations

import math

from rose.report.coserving import EngineTokens, LatencyFigures, Measure, Series, Serving, Sharing

ALONE_FROM_S, UNTIL_S = -60.0, 150.0


def make_latencies(*, shared: bool) -> LatencyFigures:
    slower = 1.03 if shared else 1.0
    return LatencyFigures(
        requests=316 if shared else 124,
        outcomes={"completed": 315, "timed_out": 1} if shared else {"completed": 124},
        tokens=9_800 if shared else 3_910,
        duration_s=150.0 if shared else 60.0,
        ttft_p50_ms=21.0 * slower,
        ttft_p95_ms=64.0 * slower,
        ttft_p99_ms=88.0 * slower * slower,
        tpot_p50_ms=5.1 * slower,
        tpot_p95_ms=7.2 * slower,
        tpot_p99_ms=8.8 * slower,
        slo_kept=0.9968 if shared else 1.0,
        ttft_kept=0.9968 if shared else 1.0,
        tpot_kept=0.9968 if shared else 1.0,
        client_lag_p99_ms=1.4,
    )


def make_serving() -> Serving:
    return Serving(
        trace="azure_2023_conv",
        attribution="Azure LLM inference trace 2023, CC-BY 4.0",
        history=("60 s from 1800 s on", "rate scaled to 2 requests/s", "prompts x 0.0625"),
        rate_rps=2.07,
        replays=3,
        slo_ttft_ms=88.0 * 1.6,
        slo_tpot_ms=8.8 * 1.27,
        slo_ttft_factor=1.6,
        slo_tpot_factor=1.27,
        alone=make_latencies(shared=False),
        shared=make_latencies(shared=True),
    )


def busy(at_s: float) -> float:
    """How busy serving is, 0 to 1: two bursts a minute over a slow wave."""
    return 0.12 + 0.1 * math.sin(at_s / 19) ** 2 + 0.55 * math.exp(-(((at_s % 41) - 20) ** 2) / 18)


def make_series() -> tuple[Series, ...]:
    everywhere = [ALONE_FROM_S + 2.0 * number for number in range(int((UNTIL_S - ALONE_FROM_S) / 2))]
    lent = [at_s for at_s in everywhere if at_s >= 30]

    def series(what: Measure, who: str, at_s: list[float], values: list[float | None]) -> Series:
        return Series(what=what, who=who, at_s=tuple(at_s), values=tuple(values))

    def guest(at_s: float) -> float:
        return max(0.0, 0.93 - 1.25 * busy(at_s))

    return (
        series("compute", "serving", everywhere, [busy(at_s) for at_s in everywhere]),
        series("compute", "guest", lent, [guest(at_s) for at_s in lent]),
        series("kv_used", "serving", everywhere, [0.6 * busy(at_s) for at_s in everywhere]),
        series("kv_used", "guest", lent, [0.35 * guest(at_s) for at_s in lent]),
        series("gate_open", "guest", lent, [min(1.0, 1.2 * guest(at_s)) for at_s in lent]),
        series("ttft_p95_ms", "serving", everywhere, [24 + 66 * busy(at_s) for at_s in everywhere]),
        series("tpot_p95_ms", "serving", everywhere, [5 + 3.4 * busy(at_s) for at_s in everywhere]),
        series(
            "rollout_tokens_s", "engine-0", lent, [None if at_s < 32 else 420 + 60 * math.sin(at_s) for at_s in lent]
        ),
        series("rollout_tokens_s", "lent-0", lent, [310 * guest(at_s) for at_s in lent]),
        series("weight_version", "engine-0", lent, [float(at_s // 10 - 3) for at_s in lent]),
        series("weight_version", "lent-0", lent, [float(max(0.0, (at_s - 1) // 10 - 3)) for at_s in lent]),
    )


def make_sharing() -> Sharing:
    return Sharing(
        partition="idle scheduling class on one shared core; costs serving one context switch for each of its steps",
        series=make_series(),
        guest_restarts=1,
        preemptions=4,
        starvations=0,
        fetched_bytes=1_204_331,
    )


def make_engines() -> tuple[EngineTokens, ...]:
    return (
        EngineTokens(engine_id="engine-0", kind="dedicated", tokens_received=48_033, requests=9_411, lost_requests=0),
        EngineTokens(engine_id="lent-0", kind="lent", tokens_received=21_557, requests=4_230, lost_requests=2),
    )
