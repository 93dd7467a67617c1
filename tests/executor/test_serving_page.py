"""What is found on a serving vLLM's own page, and that no other page does any harm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rose_executor.serving_page import PageFigures, Sum, read_page

# Lines of vLLM 0.32, with those that must not be taken for the ones that are wanted.
PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {model}, \\"quoted\\""} 3.0
vllm:num_requests_waiting{engine="0",model_name="serving"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="serving",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="serving"} 0.25
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="serving"} 99.0
vllm:iteration_tokens_total_count{engine="0",model_name="serving"} 180.0
vllm:iteration_tokens_total_sum{engine="0",model_name="serving"} 204.0
vllm:iteration_tokens_total_created{engine="0",model_name="serving"} 1.7960904097672644e+09
vllm:time_to_first_token_seconds_count{engine="0",model_name="serving"} 3.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="serving"} 0.03125
vllm:inter_token_latency_seconds_count{engine="0",model_name="serving"} 177.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="serving"} 3.5e-01
vllm:cache_config_info{block_size="32",num_cpu_blocks="None",num_gpu_blocks="1024",num_gpu_blocks_override="7"} 1.0
"""
FIGURES = PageFigures(3, 2, 0.25, 1024, Sum(204.0, 180.0), Sum(0.35, 177.0), Sum(0.03125, 3.0))
LEAST = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


def test_the_figures_are_found_by_name() -> None:
    assert read_page(PAGE) == FIGURES
    assert read_page(PAGE.replace(b"\n", b"\r\n")) == FIGURES


def test_several_engines_count_as_one() -> None:
    both = read_page(PAGE + PAGE.replace(b'engine="0"', b'engine="1"').replace(b"} 0.25", b"} 0.5"))
    assert both == PageFigures(6, 4, 0.5, 1024, Sum(408.0, 360.0), Sum(0.7, 354.0), Sum(0.0625, 6.0))


@pytest.mark.parametrize("name", [b"num_requests_running", b"num_requests_waiting"])
@pytest.mark.parametrize("value", [b"NaN", b"-1.0", b"+Inf", b"1e300", b"many", b"1.2.3", b""])
def test_a_page_that_does_not_say_what_runs_and_waits_says_nothing(name: bytes, value: bytes) -> None:
    odd = b"vllm:" + name + b" " + value + b"\n"
    assert read_page(odd + LEAST.replace(b"vllm:" + name + b" 0\n", b"")) is None
    assert read_page(LEAST.replace(b"vllm:" + name + b" 0\n", b"")) is None


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        (b"vllm:kv_cache_usage_perc NaN", "kv_usage"),
        (b"vllm:kv_cache_usage_perc 1.5", "kv_usage"),
        (b"vllm:kv_cache_usage_perc -0.5", "kv_usage"),
        (b'vllm:cache_config_info{num_gpu_blocks="None"} 1.0', "kv_blocks"),
        (b'vllm:cache_config_info{num_gpu_blocks="-3"} 1.0', "kv_blocks"),
        (b"vllm:iteration_tokens_total_sum 4\nvllm:iteration_tokens_total_count NaN", "steps"),
        (b"vllm:iteration_tokens_total_sum 4", "steps"),
        (b"vllm:inter_token_latency_seconds_sum -4\nvllm:inter_token_latency_seconds_count 1", "token_s"),
        (b"vllm:time_to_first_token_seconds_sum 1e300\nvllm:time_to_first_token_seconds_count 1", "first_token_s"),
    ],
)
def test_any_other_figure_that_makes_no_sense_is_missing(line: bytes, missing: str) -> None:
    figures = read_page(LEAST + line)
    assert figures is not None
    assert getattr(figures, missing) is None


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_no_page_raises(page: bytes) -> None:
    assert read_page(page) is None
    assert read_page(LEAST + page) is not None or b"vllm:num_requests" in page


@given(st.integers(0, len(PAGE)), st.binary(max_size=4), st.integers(0, 40))
def test_no_damage_to_a_page_raises(at: int, put: bytes, cut: int) -> None:
    figures = read_page(PAGE[:at] + put + PAGE[at + cut :])
    assert figures is None or 0 <= figures.running + figures.waiting <= 2**20


AMOUNTS = st.floats(0, 1e9)
LABELS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    st.lists(LABELS, min_size=1, max_size=3, unique=True),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=3, max_size=3),
    st.lists(AMOUNTS, max_size=20),
)
def test_it_reads_what_prometheus_own_parser_reads(
    models: Sequence[str], requests: Sequence[tuple[int, int]], seconds: Sequence[float]
) -> None:
    """Whatever a model is called, and whatever stands beside the figures."""
    registry = CollectorRegistry()
    running = Gauge("vllm:num_requests_running", "A text.", ["model_name"], registry=registry)
    waiting = Gauge("vllm:num_requests_waiting", 'Another "{text}".', ["model_name"], registry=registry)
    tokens = Histogram("vllm:inter_token_latency_seconds", "", ["model_name"], registry=registry)
    for model, (runs, waits) in zip(models, requests, strict=False):
        running.labels(model).set(runs)
        waiting.labels(model).set(waits)
        for figure in seconds:
            tokens.labels(model).observe(figure)
    page = generate_latest(registry)
    samples = [one for family in text_string_to_metric_families(page.decode()) for one in family.samples]

    def total(name: str) -> float:
        return math.fsum(one.value for one in samples if one.name == f"vllm:{name}")

    figures = read_page(page)
    assert figures is not None
    assert (figures.running, figures.waiting) == (total("num_requests_running"), total("num_requests_waiting"))
    if seconds:
        assert figures.token_s is not None
        assert figures.token_s.total == pytest.approx(total("inter_token_latency_seconds_sum"))
        assert figures.token_s.count == total("inter_token_latency_seconds_count")
    else:
        assert figures.token_s is None
