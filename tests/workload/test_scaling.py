from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.workload.scaling import Scaling, at_rate, scaled, spread, window, with_lengths, within_context
from rose.workload.shipped_traces import shipped_trace
from rose.workload.trace import Trace, TraceRequest


def trace_of(*arrivals_s: float, length_s: float | None = None, prompt: int = 10, output: int = 10) -> Trace:
    requests = tuple(TraceRequest(at_s, prompt + number, output) for number, at_s in enumerate(arrivals_s))
    return Trace("t", "a", requests, arrivals_s[-1] if length_s is None else length_s)


def arrivals(trace: Trace) -> list[float]:
    return [request.arrival_s for request in trace.requests]


TRACES = st.lists(st.integers(0, 10**6), min_size=1, max_size=40).map(
    lambda numbers: trace_of(*sorted(number / 1000 for number in numbers))
)


def test_a_window_by_its_start_holds_its_beginning_and_not_its_end() -> None:
    trace = window(trace_of(0.0, 1.0, 2.0, 2.5, 3.0, 9.0), 2.0, 1.0)
    assert arrivals(trace) == [0.0, 1.0, 1.5]
    assert trace.length_s == 2.0
    assert trace.history == ("cut to the 2 s from 1.0 s on: 3 of 6 requests",)


def test_the_busiest_window_is_the_first_with_the_most_requests() -> None:
    trace = window(trace_of(0.0, 5.0, 5.5, 7.0, 10.0, 10.5, 11.0, 20.0, 20.5, 21.0), 1.5)
    assert trace.history == ("cut to the busiest 1.5 s from 10.0 s on: 3 of 10 requests",)
    assert arrivals(trace) == [0.0, 0.5, 1.0]


@given(TRACES, st.integers(1, 10**6).map(lambda ms: ms / 1000))
def test_no_window_has_more_requests_than_the_busiest(trace: Trace, length_s: float) -> None:
    most = len(window(trace, length_s).requests)
    assert all(len(window(trace, length_s, start_s).requests) <= most for start_s in arrivals(trace))


def test_a_window_past_the_end_ends_with_the_trace() -> None:
    assert window(trace_of(0.0, 1.0, 5.0, length_s=6.0), 100.0, 1.0).length_s == 5.0


@given(TRACES, st.floats(0.001, 1000))
def test_a_rate_keeps_the_shape_of_bursts(trace: Trace, rate_rps: float) -> None:
    if trace.length_s == 0:
        with pytest.raises(ConfigError, match="at one moment"):
            at_rate(trace, rate_rps)
        return
    changed = at_rate(trace, rate_rps)
    assert changed.rate_rps == pytest.approx(rate_rps)
    factor = changed.length_s / trace.length_s
    assert arrivals(changed) == pytest.approx([one * factor for one in arrivals(trace)])
    assert [one.prompt_tokens for one in changed.requests] == [one.prompt_tokens for one in trace.requests]


def test_burstiness_survives_a_change_of_rate() -> None:
    original = shipped_trace("azure_2023_code")
    assert coefficient(at_rate(original, 1.0)) == pytest.approx(coefficient(original))
    assert coefficient(original) > 10


def coefficient(trace: Trace) -> float:
    """Of variation, of the times between arrivals."""
    gaps = [later - earlier for earlier, later in pairwise(arrivals(trace))]
    mean = sum(gaps) / len(gaps)
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def test_a_change_of_rate_says_which_way() -> None:
    trace = trace_of(0.0, 10.0)
    assert at_rate(trace, 0.1).history == ("time 2 times as slow: 0.2 became 0.1 requests per second, over 20.0 s",)
    assert at_rate(trace, 1.0).history == ("time 5 times as fast: 0.2 became 1 requests per second, over 2.0 s",)


def test_lengths_are_rounded_and_never_nothing() -> None:
    requests = (TraceRequest(0.0, 1000, 33), TraceRequest(1.0, 3, 1, (7, 8)))
    trace = with_lengths(Trace("t", "a", requests, 1.0, block_tokens=16), 1 / 32, 1 / 16)
    assert [(one.prompt_tokens, one.output_tokens) for one in trace.requests] == [(31, 2), (1, 1)]
    assert trace.block_tokens == 0.5
    assert trace.requests[1].prefix_blocks == (7, 8)
    assert trace.history == ("prompts × 0.03125, answers × 0.0625: mean 16.0 tokens in, 1.5 out",)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 2000))
def test_every_request_fits_its_context(prompt: int, output: int, context: int) -> None:
    (one,) = within_context(trace_of(0.0, prompt=prompt, output=output), context).requests
    assert one.prompt_tokens + one.output_tokens <= context
    assert one.prompt_tokens <= prompt
    assert one.output_tokens <= output
    if prompt + output <= context:
        assert (one.prompt_tokens, one.output_tokens) == (prompt, output)
    else:
        # Nothing is given away: the context is full, and an answer up to half of it is spared.
        assert one.prompt_tokens + one.output_tokens == context
        assert one.output_tokens >= min(output, context // 2)


def test_what_was_shortened_is_counted() -> None:
    trace = Trace("t", "a", (TraceRequest(0.0, 100, 10), TraceRequest(0.0, 10, 100), TraceRequest(0.0, 1, 1)), 0.0)
    changed = within_context(trace, 60)
    assert [(one.prompt_tokens, one.output_tokens) for one in changed.requests] == [(50, 10), (10, 50), (1, 1)]
    assert changed.history[0].startswith(
        "all within a context of 60 tokens after 1 prompts and 1 answers were shortened: mean"
    )
    assert within_context(changed, 60).history[1].startswith("all within a context of 60 tokens: mean")


def test_batches_are_spread_by_seed_and_lone_requests_stay() -> None:
    trace = trace_of(0.0, 3.0, 3.0, 3.0, 6.0)
    changed = spread(trace, 3.0, seed=1)
    assert arrivals(changed)[0] == 0.0
    assert arrivals(changed)[-1] == 6.0
    assert all(3.0 <= one < 6.0 for one in arrivals(changed)[1:4])
    assert len(set(arrivals(changed))) == 5
    assert changed == spread(trace, 3.0, seed=1)
    assert changed != spread(trace, 3.0, seed=2)
    assert changed.history == ("3 requests that arrived together spread over 3 s each (seed 1)",)
    assert sorted(one.prompt_tokens for one in changed.requests) == [10, 11, 12, 13, 14]


def test_all_steps_together_say_what_they_did() -> None:
    original = shipped_trace("azure_2023_conv")
    options = Scaling(
        window_s=60.0, rate_rps=2.0, keep_s=30.0, prompt_scale=1 / 16, output_scale=1 / 16, context_tokens=100, seed=3
    )
    trace = scaled(original, options)
    assert trace == scaled(original, options)
    assert [line.split()[0] for line in trace.history] == ["cut", "time", "cut", "prompts", "all"]
    assert trace.length_s == 30.0
    assert trace.requests[-1].arrival_s < 30.0
    assert trace.attribution == original.attribution
    assert scaled(original, Scaling()) == original


@pytest.mark.parametrize(
    "options",
    [
        Scaling(window_s=0.0),
        Scaling(window_s=math.nan),
        Scaling(window_s=1.0, start_s=-1.0),
        Scaling(window_s=1.0, start_s=math.inf),
        Scaling(window_s=1.0, start_s=100.0),
        Scaling(start_s=1.0),
        Scaling(rate_rps=0.0),
        Scaling(rate_rps=5e-324),
        Scaling(rate_rps=math.inf),
        Scaling(keep_s=-1.0),
        Scaling(prompt_scale=0.0),
        Scaling(prompt_scale=1e12),
        Scaling(output_scale=1e308),
        Scaling(context_tokens=1),
        Scaling(spread_s=0.0),
        Scaling(spread_s=math.inf),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused(options: Scaling) -> None:
    with pytest.raises(ConfigError) as caught:
        scaled(trace_of(0.0, 1.0), options)
    assert caught.value.expected or caught.value.to_do
