"""Every metric of ROSE: the one place where their names stand.

`Metrics` makes them all in a registry of its own, `serve` shows that registry on the loopback interface.
Token figures are gauges because they are set from the ledger, whose accounts also shrink (in flight).
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from rose.errors import ClusterError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

ADDRESS = "127.0.0.1"
_FAST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LATENCY_S = tuple(round(0.0005 * 10 ** (step / 12), 7) for step in range(53))
"""From 0.5 ms to over 10 s, twelve to a decade: what is interpolated inside one is wrong by 10 % at most."""
_WAIT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SLOW_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class Metrics:
    """The metrics of one process; `registry` holds exactly these."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"rose_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"rose_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"rose_{name}_seconds", text, registry=registry, buckets=buckets)

        self.tokens = gauge("tokens", "Generated tokens in each account of the ledger.", "account")
        self.tokens_generated = gauge("tokens_generated", "Tokens that the engines say they sampled.")
        self.ledger_gap_tokens = gauge("ledger_gap_tokens", "Generated tokens that no account holds; must be 0.")

        self.trajectories = counter("trajectories_total", "Finished trajectories.", "purpose", "outcome")
        self.turns = counter("turns_total", "Finished turns.", "purpose")
        self.malformed_fraction = gauge("malformed_fraction", "Share of malformed actions in the last step.")
        self.success_fraction = gauge("success_fraction", "Share of successful trajectories, last step.", "purpose")
        self.environment_failures = counter("environment_failures_total", "Environments that raised or hung.", "kind")

        self.steps = counter("steps_total", "Finished training steps.")
        self.rollout_seconds = seconds("rollout", "Wall time of a step's rollout.", _SLOW_S)
        self.train_seconds = seconds("train", "Wall time of a step's update.", _SLOW_S)

        self.versions_published = counter("versions_published_total", "Weight versions published.")
        self.weight_version = gauge("weight_version", "Weight version that an engine samples with.", "engine_id")
        self.apply_seconds = seconds("apply", "From asking an engine for a version until it samples with it.", _FAST_S)
        self.pause_seconds = seconds("pause", "How long an engine stood still to change its version.", _FAST_S)
        self.parity_difference = gauge("parity_difference", "Largest log-prob difference, live to fresh engine.")

        self.engine_restarts = counter("engine_restarts_total", "Engines started anew after a death.", "engine_id")
        self.open_waits = gauge("open_waits", "Named waits that are open now.")


class LoadMetrics:
    """The metrics of a load client; `registry` holds exactly these. Seconds as the client saw them."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _FAST_S) -> Histogram:
            return Histogram(f"rose_load_{name}_seconds", text, registry=registry, buckets=buckets)

        self.requests = Counter(
            "rose_load_requests_total",
            "Requests of the replay that ended, or were refused.",
            ["outcome"],
            registry=registry,
        )
        self.tokens = Counter("rose_load_tokens_total", "Tokens received.", registry=registry)
        self.in_flight = Gauge("rose_load_in_flight", "Requests in flight now.", registry=registry)
        self.ttft_seconds = seconds("ttft", "From sending a completed request to its first token.", _LATENCY_S)
        self.tpot_seconds = seconds("tpot", "Mean time per token after the first, of a completed request.", _LATENCY_S)
        self.gap_seconds = seconds("gap", "Between successive arrivals of tokens.")
        self.lag_seconds = seconds("lag", "How much later than due a request left: the client's own fault.")
        self.loop_lag_seconds = seconds("loop_lag", "How long the client itself stood still.")
        self.records_lost = Gauge("rose_load_records_lost", "Lines that are not in the file.", registry=registry)
        self.open_waits = Gauge("rose_open_waits", "Named waits that are open now.", registry=registry)


class SchedulerMetrics:
    """The metrics of a scheduler; `registry` holds exactly these."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"rose_scheduler_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"rose_scheduler_{name}", text, labels, registry=registry)

        self.granted = counter("leases_granted_total", "Leases granted.", "kind", "affine")
        self.refused = counter("leases_refused_total", "Leases refused.", "reason")
        self.lapsed = counter("leases_lapsed_total", "Leases that nobody ended, or that found no place.", "lapse")
        self.ended = counter("leases_ended_total", "Reports of an end; only those that ended count.", "verdict")
        self.tokens = counter("tokens_total", "Tokens that were received on leases, as their holders say.")
        self.moved_tokens = counter("moved_context_tokens_total", "Context of turns that left their prefix behind.")
        self.wait_seconds = Histogram(
            "rose_scheduler_wait_seconds", "From asking for a lease to its grant.", registry=registry, buckets=_WAIT_S
        )
        self.waiting = gauge("leases_waiting", "Leases that wait for an engine.")
        self.held = gauge("leases_held", "Leases that are held.")
        self.engines = gauge("engines", "Engines that are offered.", "health")
        self.remembered = gauge("remembered", "Entries in memory; each kind is bounded.", "kind")
        self.open_waits = gauge("open_waits", "Named waits that are open now.")


class ExecutorMetrics:
    """The metrics of an executor; `registry` holds exactly these. `who` is serving or guest.

    A figure of an engine that cannot be seen is left out.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"rose_executor_{name}_total", text, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"rose_executor_{name}", text, labels, registry=registry)

        self.compute_ratio = gauge("compute_ratio", "Share of the last second in which an engine computed.", "who")
        self.kv_used_ratio = gauge("kv_used_ratio", "Share of an engine's KV cache that is in use.", "who")
        self.gate_open_ratio = gauge("gate_open_ratio", "Share of the last second in which the guest might compute.")
        self.requests = gauge("requests", "Requests that an engine runs.", "who")
        self.tier = gauge("tier", "1 for the tier that is in force: unseen, observe, board or full.", "tier")
        self.slots_open = gauge("slots_open", "Requests that the guest may be given now.")
        self.slo_seconds = gauge("slo_seconds", "What the serving engine owes its users.", "what")
        self.weight_version = gauge("weight_version", "Weight version that the guest samples with.")
        self.guest_tokens = gauge("guest_tokens", "Tokens that the guest generated in all its lives.")
        self.guest_restarts = counter("guest_restarts", "Guests started anew after a death.")
        self.wrong_answers = counter("wrong_answers", "Guests that did not compute what their version must.")
        self.preemptions = counter("preemptions", "Requests that a shrinking quota set back.")
        self.moved = counter("moved", "Requests that were given back with their tokens, to go on elsewhere.")
        self.step_margin = gauge("step_margin", "What expected costs of the guest's steps are multiplied by.")
        self.kv_budget_bytes = gauge("kv_budget_bytes", "Memory that the guest's keys and values may take in the pool.")
        self.kv_held_bytes = gauge("kv_held_bytes", "Memory behind the guest's keys and values, as it last said.")
        self.kv_frozen = gauge("kv_frozen", "Whether that may not grow because of a cut.")
        self.kv_cuts = counter("kv_cuts", "Times that serving's use cut it.")
        self.kv_turns = counter("kv_turns", "Times that it grew after a cut, or was cut after it had grown.")
        self.presence = gauge("presence", "1 for what the guest is: active, asleep or gone.", "state")
        self.presence_bytes = gauge(
            "presence_bytes", "What the guest holds of the host's memory in a state, as last measured.", "state"
        )
        self.presence_seconds = gauge(
            "presence_seconds", "How long the guest last took to come up from a state.", "state"
        )
        self.starvations = counter("starvations", "Times that requests began to starve although the gate was open.")
        self.fetched_bytes = counter("fetched_bytes", "Payload that came for new weight versions.")
        self.pause_seconds = Histogram(
            "rose_executor_pause_seconds",
            "How long the guest stood still to change its version.",
            registry=registry,
            buckets=_FAST_S,
        )
        self.open_waits = Gauge("rose_open_waits", "Named waits that are open now.", registry=registry)


class DashboardMetrics:
    """The metrics of a dashboard; `registry` holds exactly these."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"rose_dashboard_{name}", text, registry=registry)

        self.services = gauge("services", "Services that are known, those that ended included.")
        self.unanswered = gauge("addresses_unanswered", "Addresses of metrics that do not answer well now.")
        self.series = gauge("series", "Series in memory.")
        self.series_refused = gauge("series_refused", "Series that found no place so far.")
        self.viewers = gauge("viewers", "Pages that are open.")
        self.snapshots = Counter(
            "rose_dashboard_snapshots_total",
            "Whole states sent: one to each viewer, and one more to each that was slow.",
            registry=registry,
        )
        self.open_waits = Gauge("rose_open_waits", "Named waits that are open now.", registry=registry)


class MetricsServer:
    """A running scrape endpoint. Made by `serve`."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/metrics"

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def serve(port: int, registry: CollectorRegistry, unhealthy: Callable[[], str] | None = None) -> MetricsServer:
    """Answer scrapes of `registry` at http://127.0.0.1:`port`/metrics; port 0 takes any free one.

    With `unhealthy`, which is called in a thread, /healthz answers 200 as long as that says "", else 503 and its words.
    Raises ClusterError if the port is taken or may not be used.
    """
    try:
        server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise ClusterError(
            f"port {port} for metrics: {'taken' if taken else error}",
            expected="a free port on the loopback interface",
            to_do="choose another port, or 0 for any free one",
        ) from error
    if unhealthy is not None:
        server.set_app(_with_health(server.get_app(), unhealthy))
    return MetricsServer(server, thread)


def _with_health(metrics: WSGIApplication | None, unhealthy: Callable[[], str]) -> WSGIApplication:
    assert metrics is not None

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/healthz":
            return metrics(environ, start_response)
        why = unhealthy()
        start_response("503 Service Unavailable" if why else "200 OK", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{why or 'ok'}\n".encode()]

    return answer
