from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest

import rose.metrics
from rose.observer.exposition import LINES_MAX, Sample, UnreadableMetrics, parsed
from rose.observer.figures import FIGURES, WANTED


def test_only_what_is_wanted_is_read() -> None:
    text = '# HELP a x\n# TYPE a gauge\na{who="x"} 1.0\na{who="y"} 2\naa 3\nb_total 4\nb_created 5\n'
    assert parsed(text, {"a", "b_total"}) == {
        "a": (Sample({"who": "x"}, 1.0), Sample({"who": "y"}, 2.0)),
        "b_total": (Sample({}, 4.0),),
    }


def test_labels_may_hold_anything() -> None:
    registry = CollectorRegistry()
    nasty = 'a"b\\c\nd{e} <script>'
    Counter("a", "-", ["who"], registry=registry).labels(nasty).inc(3)
    text = generate_latest(registry).decode()
    assert parsed(text, {"a_total"}) == {"a_total": (Sample({"who": nasty}, 3.0),)}
    assert "text/plain" in CONTENT_TYPE_LATEST


def test_what_is_no_number_is_left_out() -> None:
    assert parsed("a NaN\nb +Inf\n", {"a", "b"}) == {"b": (Sample({}, float("inf")),)}


@pytest.mark.parametrize("text", ['a{who="', "a one\n", "a{who=x} 1\n", "a\n"])
def test_torn_lines_are_refused(text: str) -> None:
    with pytest.raises(UnreadableMetrics):
        parsed(text, {"a"})


def test_a_flood_is_refused_unread() -> None:
    with pytest.raises(UnreadableMetrics, match="samples of which at most"):
        parsed('a{x="1"} 1\n' * (LINES_MAX + 1), {"a"})
    assert parsed("b 1\n" * (LINES_MAX + 1) + "a 1\n", {"a"}) == {"a": (Sample({}, 1.0),)}


@given(st.text(alphabet='a{}="\\, 1.e+-#\n\x00é', max_size=60))
def test_no_text_does_more_than_being_refused(text: str) -> None:
    with contextlib.suppress(UnreadableMetrics):
        parsed(text, {"a", ""})


def test_every_figure_of_ours_is_of_a_metric_that_there_is() -> None:
    makers = [one for name, one in vars(rose.metrics).items() if name.endswith("Metrics")]
    families = [family for maker in makers for family in maker().registry.collect()]
    named = {family.name for family in families} | {f"{one.name}_total" for one in families if one.type == "counter"}
    assert {one.metric for one in FIGURES if one.metric.startswith("rose_")} <= named
    assert all(name.startswith(("rose_", "vllm:")) for name in WANTED)
