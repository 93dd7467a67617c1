"""Which figures are made of which metrics: the one place where an observer's series get their names. Pure."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 15.0
"""Rates and quantiles are over the seconds before now."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The value as it stands, one for each value of the label `by`; what else it is labelled with is summed."""

    name: str
    metric: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Rate:
    """How much it grew per second over the window. A value that falls has begun again from 0."""

    name: str
    metric: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Quantile:
    """Of the values that a histogram got within the window."""

    name: str
    metric: str
    fraction: float


Figure = Latest | Rate | Quantile

TTFT = "rose_load_ttft_seconds"
TPOT = "rose_load_tpot_seconds"
REQUESTS = "rose_load_requests_total"

FIGURES: tuple[Figure, ...] = (
    # a load client: what the users of serving see, in seconds
    Quantile("ttft p50", TTFT, 0.5),
    Quantile("ttft p95", TTFT, 0.95),
    Quantile("ttft p99", TTFT, 0.99),
    Quantile("tpot p50", TPOT, 0.5),
    Quantile("tpot p95", TPOT, 0.95),
    Quantile("tpot p99", TPOT, 0.99),
    Rate("load requests", REQUESTS, "outcome"),
    Rate("load tokens", "rose_load_tokens_total"),
    Latest("load in flight", "rose_load_in_flight"),
    # an executor
    Latest("compute", "rose_executor_compute_ratio", "who"),
    Latest("kv", "rose_executor_kv_used_ratio", "who"),
    Latest("gate", "rose_executor_gate_open_ratio"),
    Latest("running", "rose_executor_requests", "who"),
    Latest("slots", "rose_executor_slots_open"),
    Latest("slo", "rose_executor_slo_seconds", "what"),
    Latest("guest version", "rose_executor_weight_version"),
    Rate("guest tokens", "rose_executor_guest_tokens"),
    Latest("guest restarts", "rose_executor_guest_restarts_total"),
    Latest("preemptions", "rose_executor_preemptions_total"),
    Latest("starvations", "rose_executor_starvations_total"),
    Latest("fetched", "rose_executor_fetched_bytes_total"),
    Rate("fetched bytes", "rose_executor_fetched_bytes_total"),
    # a run
    Latest("account", "rose_tokens", "account"),
    Latest("generated", "rose_tokens_generated"),
    Latest("gap", "rose_ledger_gap_tokens"),
    Rate("run tokens", "rose_tokens_generated"),
    Latest("success", "rose_success_fraction", "purpose"),
    Latest("steps", "rose_steps_total"),
    Latest("version", "rose_weight_version", "engine_id"),
    Latest("engine restarts", "rose_engine_restarts_total", "engine_id"),
    # a scheduler
    Latest("leases waiting", "rose_scheduler_leases_waiting"),
    Latest("leases held", "rose_scheduler_leases_held"),
    Latest("engines", "rose_scheduler_engines", "health"),
    Rate("leases", "rose_scheduler_leases_granted_total", "kind"),
    # an engine's own
    Rate("engine tokens", "vllm:generation_tokens_total"),
    Latest("engine running", "vllm:num_requests_running"),
    Latest("engine kv", "vllm:kv_cache_usage_perc"),
)

COUNTED = frozenset(
    [one.metric for one in FIGURES if isinstance(one, Rate)]
    + [f"{one.metric}_bucket" for one in FIGURES if isinstance(one, Quantile)]
)
"""Samples of which a history is kept, since what counts is how they grow."""

WANTED = COUNTED | {one.metric for one in FIGURES if isinstance(one, Latest)}
"""All samples that are read at all."""
