from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rose.metrics import ExecutorMetrics, LoadMetrics
from rose.observer.exposition import parsed
from rose.observer.figures import WANTED
from rose.observer.measures import ATTAINED_OVER_S, FRESH_S, Measures, SeriesKey, Source, slo_s

LOAD, EXECUTOR = Source("demo-1", "load"), Source("executor-1")


class Scraped:
    """Measures of what these registries say, scraped by the second."""

    def __init__(self) -> None:
        self.measures = Measures()
        self.load, self.executor = LoadMetrics(), ExecutorMetrics()
        self.now_s = 100.0

    def scrape(self, source: Source, registry: CollectorRegistry) -> None:
        self.measures.scraped(source, self.now_s, parsed(generate_latest(registry).decode(), WANTED))

    def second(self) -> dict[SeriesKey, float]:
        self.now_s += 1
        self.scrape(LOAD, self.load.registry)
        self.scrape(EXECUTOR, self.executor.registry)
        return self.measures.at(self.now_s)

    def completes(self, ttft_s: float, tpot_s: float | None) -> None:
        self.load.requests.labels("completed").inc()
        self.load.ttft_seconds.observe(ttft_s)
        if tpot_s is not None:
            self.load.tpot_seconds.observe(tpot_s)

    def owes(self, ttft_s: float, tpot_s: float) -> None:
        self.executor.slo_seconds.labels("ttft").set(ttft_s)
        self.executor.slo_seconds.labels("tpot").set(tpot_s)


def kept(told: dict[SeriesKey, float], what: str) -> float | None:
    return told.get(SeriesKey(LOAD, "kept", what))


def test_percentiles_are_of_the_last_seconds_alone() -> None:
    scraped = Scraped()
    scraped.completes(5.0, 0.5)
    scraped.second()
    for _ in range(100):
        scraped.completes(0.1, 0.01)
    told = scraped.second()
    assert told[SeriesKey(LOAD, "ttft p99")] == pytest.approx(0.1, rel=0.12)
    assert told[SeriesKey(LOAD, "tpot p50")] == pytest.approx(0.01, rel=0.12)
    for _ in range(16):
        told = scraped.second()
    assert SeriesKey(LOAD, "ttft p99") not in told


def test_rates_are_per_second_and_by_label() -> None:
    scraped = Scraped()
    scraped.second()
    for _ in range(20):
        scraped.load.requests.labels("completed").inc(3)
        scraped.executor.guest_tokens.inc(50)
        told = scraped.second()
    assert told[SeriesKey(LOAD, "load requests", "completed")] == pytest.approx(3.0)
    assert told[SeriesKey(EXECUTOR, "guest tokens")] == pytest.approx(50.0)


def test_attainment_judges_every_request_that_ended_but_those_that_were_cut() -> None:
    scraped = Scraped()
    scraped.owes(0.2, 0.02)
    scraped.second()
    for _ in range(6):
        scraped.completes(0.05, 0.005)
    scraped.completes(0.05, None)
    scraped.completes(3.0, 0.005)
    scraped.completes(0.05, 0.3)
    scraped.load.requests.labels("refused").inc()
    scraped.load.requests.labels("cut").inc(7)
    told = scraped.second()
    assert kept(told, "ttft") == pytest.approx(0.8)
    assert kept(told, "tpot") == pytest.approx(0.8)


def test_attainment_forgets_what_is_long_ago() -> None:
    scraped = Scraped()
    scraped.owes(0.2, 0.02)
    scraped.second()
    scraped.completes(3.0, 3.0)
    assert kept(scraped.second(), "ttft") == 0.0
    scraped.now_s += ATTAINED_OVER_S - 3
    scraped.completes(0.01, 0.001)
    assert kept(scraped.second(), "ttft") == 0.5
    scraped.now_s += 1
    scraped.completes(0.01, 0.001)
    assert kept(scraped.second(), "ttft") == 1.0


def test_without_one_slo_there_is_no_attainment() -> None:
    scraped = Scraped()
    scraped.second()
    scraped.completes(0.05, 0.005)
    assert kept(scraped.second(), "ttft") is None
    scraped.owes(0.2, 0.02)
    told = scraped.second()
    assert slo_s(told, "ttft") == 0.2
    assert kept(told, "ttft") == 1.0
    another = ExecutorMetrics()
    another.slo_seconds.labels("ttft").set(0.3)
    another.slo_seconds.labels("tpot").set(0.02)
    scraped.scrape(Source("executor-2"), another.registry)
    told = scraped.second()
    assert slo_s(told, "ttft") is None
    assert kept(told, "ttft") is None
    assert kept(told, "tpot") == 1.0


def test_what_has_not_answered_lately_says_nothing() -> None:
    scraped = Scraped()
    scraped.executor.gate_open_ratio.set(0.5)
    assert SeriesKey(EXECUTOR, "gate") in scraped.second()
    assert SeriesKey(EXECUTOR, "gate") in scraped.measures.at(scraped.now_s + FRESH_S)
    assert scraped.measures.at(scraped.now_s + FRESH_S + 0.1) == {}
    scraped.measures.keep({LOAD.service})
    assert {key.source for key in scraped.measures.at(scraped.now_s)} == {LOAD}


def test_a_source_that_was_started_again_goes_on_with_what_it_had_counted() -> None:
    scraped = Scraped()
    scraped.owes(0.2, 0.02)
    scraped.second()
    for _ in range(3):
        scraped.completes(3.0, 3.0)
    scraped.second()
    scraped.load = LoadMetrics()
    scraped.completes(0.01, 0.001)
    assert kept(scraped.second(), "ttft") == 0.25


def test_a_histogram_with_nonsense_for_bounds_is_none() -> None:
    measures = Measures()
    for now_s in (1.0, 2.0):
        text = f'rose_load_ttft_seconds_bucket{{le="wide"}} {now_s}\nrose_load_tpot_seconds_bucket {now_s}\n'
        measures.scraped(LOAD, now_s, parsed(text, WANTED))
    assert measures.at(2.0) == {}
