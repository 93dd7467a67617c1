from __future__ import annotations

import socket
import urllib.error
import urllib.request
from contextlib import closing

import psutil
import pytest
from prometheus_client import generate_latest

from rose.errors import ClusterError
from rose.metrics import DashboardMetrics, ExecutorMetrics, LoadMetrics, Metrics, SchedulerMetrics, serve


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read(), "utf-8")


NAMES = """
tokens tokens_generated ledger_gap_tokens trajectories turns malformed_fraction success_fraction
environment_failures steps rollout_seconds train_seconds versions_published weight_version apply_seconds
pause_seconds parity_difference engine_restarts open_waits
"""


def test_the_names_that_dashboards_rely_on() -> None:
    families = list(Metrics().registry.collect())
    assert [family.name for family in families] == [f"rose_{name}" for name in NAMES.split()]
    assert all(family.documentation.endswith(".") for family in families)


SCHEDULER_NAMES = """
leases_granted leases_refused leases_lapsed leases_ended tokens moved_context_tokens wait_seconds leases_waiting
leases_held engines remembered open_waits
"""


def test_the_names_of_a_scheduler() -> None:
    families = list(SchedulerMetrics().registry.collect())
    assert [family.name for family in families] == [f"rose_scheduler_{name}" for name in SCHEDULER_NAMES.split()]
    assert all(family.documentation.endswith(".") for family in families)


DASHBOARD_NAMES = "services addresses_unanswered series series_refused viewers snapshots"


def test_the_names_of_a_dashboard() -> None:
    families = list(DashboardMetrics().registry.collect())
    expected = [*(f"rose_dashboard_{name}" for name in DASHBOARD_NAMES.split()), "rose_open_waits"]
    assert [family.name for family in families] == expected
    assert all(family.documentation.endswith(".") for family in families)


EXECUTOR_NAMES = """
compute_ratio kv_used_ratio gate_open_ratio requests tier slots_open slo_seconds weight_version guest_tokens
guest_restarts wrong_answers preemptions moved step_margin kv_budget_bytes kv_held_bytes kv_frozen kv_cuts kv_turns
presence presence_bytes presence_seconds starvations fetched_bytes pause_seconds
"""


def test_the_names_of_an_executor() -> None:
    families = list(ExecutorMetrics().registry.collect())
    expected = [*(f"rose_executor_{name}" for name in EXECUTOR_NAMES.split()), "rose_open_waits"]
    assert [family.name for family in families] == expected
    assert all(family.documentation.endswith(".") for family in families)


def test_health_is_told_beside_the_metrics() -> None:
    why = [""]
    with closing(serve(0, Metrics().registry, lambda: why[0])) as server:
        url = server.url.replace("/metrics", "/healthz")
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
        why[0] = "nobody looks at the böard"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=10)
        assert (refused.value.code, refused.value.read().decode()) == (503, "nobody looks at the böard\n")
        assert "rose_steps_total" in scrape(server.port)


def test_figures_are_exposed_under_their_labels() -> None:
    metrics = Metrics()
    metrics.tokens.labels(account="trained").set(120)
    metrics.trajectories.labels(purpose="train", outcome="completed").inc(3)
    metrics.weight_version.labels(engine_id="engine-0").set(7)
    metrics.apply_seconds.observe(0.03)
    text = str(generate_latest(metrics.registry), "utf-8")
    assert 'rose_tokens{account="trained"} 120.0' in text
    assert 'rose_trajectories_total{outcome="completed",purpose="train"} 3.0' in text
    assert 'rose_weight_version{engine_id="engine-0"} 7.0' in text
    assert 'rose_apply_seconds_bucket{le="0.05"} 1.0' in text
    assert "python_info" not in text


def test_two_sets_of_metrics_are_apart() -> None:
    first, second = Metrics(), Metrics()
    first.steps.inc()
    assert second.registry.get_sample_value("rose_steps_total") == 0


def test_a_server_answers_on_loopback_only_and_frees_its_port() -> None:
    metrics = Metrics()
    metrics.open_waits.set(4)
    server = serve(0, metrics.registry)
    port = server.port
    assert "rose_open_waits 4.0" in scrape(port)
    listening = {one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.laddr.port == port}
    assert listening == {"127.0.0.1"}
    server.close()
    again = serve(port, metrics.registry)
    assert again.port == port
    again.close()


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} for metrics: taken") as caught:
            serve(port, Metrics().registry)
    assert "another port" in caught.value.to_do


def test_a_port_that_is_none_is_named() -> None:
    with pytest.raises(ClusterError, match="port 70000 for metrics"):
        serve(70_000, Metrics().registry)


LOAD_NAMES = """
load_requests load_tokens load_in_flight load_ttft_seconds load_tpot_seconds load_gap_seconds load_lag_seconds
load_loop_lag_seconds load_records_lost open_waits
"""


def test_the_names_of_a_load_client() -> None:
    families = list(LoadMetrics().registry.collect())
    assert [family.name for family in families] == [f"rose_{name}" for name in LOAD_NAMES.split()]
    assert all(family.documentation.endswith(".") for family in families)
