"""Makes a trace fit a machine: a part of it, slower or faster, with shorter prompts and answers.

Invariants
- Pure: the same trace, the same numbers and the same seed give the same trace.
- A change of rate stretches time as a whole, so bursts keep their shape and requests their lengths.
- Nothing is dropped but by a window; a request that is too long for a context is shortened, and counted in words.
- Each step adds one line to the trace's `history`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from rose.errors import ConfigError
from rose.workload.trace import Trace, TraceRequest, in_order


@dataclass(frozen=True, slots=True)
class Scaling:
    """What to do to a trace, in the order of the fields; None leaves out a step.

    `spread_s`: spread requests that arrive at one moment over the seconds that follow (`spread`). `window_s` and
    `start_s` in seconds of the original (`window`); `rate_rps` the mean that results (`at_rate`); `keep_s` in seconds
    of the replay; `prompt_scale` and `output_scale` (`with_lengths`); `context_tokens` (`within_context`).
    """

    spread_s: float | None = None
    window_s: float | None = None
    start_s: float | None = None
    rate_rps: float | None = None
    keep_s: float | None = None
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    context_tokens: int | None = None
    seed: int = 0


def scaled(trace: Trace, scaling: Scaling) -> Trace:
    """Raises ConfigError if a number makes no sense, or no request is left."""
    if scaling.start_s is not None and scaling.window_s is None:
        raise ConfigError(f"a start at {scaling.start_s:g} s without a window", to_do="say how long the window is")
    if scaling.spread_s is not None:
        trace = spread(trace, scaling.spread_s, scaling.seed)
    if scaling.window_s is not None:
        trace = window(trace, scaling.window_s, scaling.start_s)
    if scaling.rate_rps is not None:
        trace = at_rate(trace, scaling.rate_rps)
    if scaling.keep_s is not None:
        trace = window(trace, scaling.keep_s, 0.0)
    if (scaling.prompt_scale, scaling.output_scale) != (1.0, 1.0):
        trace = with_lengths(trace, scaling.prompt_scale, scaling.output_scale)
    if scaling.context_tokens is not None:
        trace = within_context(trace, scaling.context_tokens)
    return trace


def window(trace: Trace, length_s: float, start_s: float | None = None) -> Trace:
    """The `length_s` seconds from `start_s`, or those with the most requests (the first such, if there are several).

    The window's beginning becomes second 0; its length stays `length_s`, however early the last request arrives,
    unless the trace ends before. Raises ConfigError if there is no request in it.
    """
    _positive("window", length_s, "s")
    arrivals = [request.arrival_s for request in trace.requests]
    busiest = start_s is None
    begin_s = _busiest_start(arrivals, length_s) if start_s is None else start_s
    if not (math.isfinite(begin_s) and begin_s >= 0):
        raise ConfigError(f"a window that starts at {begin_s} s", expected="a finite number, at least 0")
    end_s = begin_s + length_s
    inside = trace.requests[bisect_left(arrivals, begin_s) : bisect_left(arrivals, end_s)]
    if not inside:
        raise ConfigError(
            f"{trace.name}: no request from {begin_s:g} to {end_s:g} s",
            expected=f"a window within its {trace.length_s:g} s",
            to_do="move or lengthen the window",
        )
    requests = tuple(replace(request, arrival_s=request.arrival_s - begin_s) for request in inside)
    kept_s = max(min(length_s, trace.length_s - begin_s), requests[-1].arrival_s)
    which = "the busiest" if busiest else "the"
    return _changed(
        trace,
        requests,
        f"cut to {which} {length_s:g} s from {begin_s:.1f} s on: {len(requests)} of {len(trace.requests)} requests",
        length_s=kept_s,
    )


def at_rate(trace: Trace, rate_rps: float) -> Trace:
    """Time stretched or pressed as a whole until the mean rate is `rate_rps`.

    Raises ConfigError if that is not above 0, or the trace has no length to stretch.
    """
    _positive("rate", rate_rps, "requests per second")
    if trace.length_s <= 0:
        raise ConfigError(
            f"{trace.name}: all requests arrive at one moment and have no rate",
            to_do="spread them, or take a longer window",
        )
    length_s = len(trace.requests) / rate_rps
    if not math.isfinite(length_s):
        raise ConfigError(f"a rate of {rate_rps} requests per second", expected="one that ends some day")
    factor = length_s / trace.length_s
    requests = tuple(replace(one, arrival_s=min(one.arrival_s * factor, length_s)) for one in trace.requests)
    pace = f"{1 / factor:.3g} times as fast" if factor < 1 else f"{factor:.3g} times as slow"
    return _changed(
        trace,
        requests,
        f"time {pace}: {trace.rate_rps:.3g} became {rate_rps:.3g} requests per second, over {length_s:.1f} s",
        length_s=length_s,
    )


def with_lengths(trace: Trace, prompt_scale: float, output_scale: float) -> Trace:
    """Prompts and answers longer or shorter by a factor, rounded, never below one token.

    Shared prefixes scale with the prompts. Raises ConfigError unless both are above 0.
    """
    _positive("prompt scale", prompt_scale, "")
    _positive("output scale", output_scale, "")
    block_tokens = trace.block_tokens * prompt_scale

    def rescaled(request: TraceRequest) -> TraceRequest:
        return replace(
            request,
            prompt_tokens=max(1, round(request.prompt_tokens * prompt_scale)),
            output_tokens=max(1, round(request.output_tokens * output_scale)),
        )

    try:
        requests = tuple(map(rescaled, trace.requests))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{trace.name}: {error}", to_do="choose smaller scales") from error
    words = f"prompts × {prompt_scale:.4g}, answers × {output_scale:.4g}: mean {_lengths(requests)}"
    return _changed(trace, requests, words, block_tokens=block_tokens)


def within_context(trace: Trace, context_tokens: int) -> Trace:
    """Each request shortened until prompt and answer fit `context_tokens` together.

    An answer gives way only beyond half of the context; the rest is cut from the prompt. Raises ConfigError below 2.
    """
    if context_tokens < 2:
        raise ConfigError(f"a context of {context_tokens} tokens", expected="at least 2: a prompt and an answer")
    cut = {"prompts": 0, "answers": 0}

    def fitted(request: TraceRequest) -> TraceRequest:
        if request.prompt_tokens + request.output_tokens <= context_tokens:
            return request
        spared = max(context_tokens // 2, context_tokens - request.prompt_tokens)
        output_tokens = min(request.output_tokens, spared)
        prompt_tokens = min(request.prompt_tokens, context_tokens - output_tokens)
        cut["answers"] += output_tokens < request.output_tokens
        cut["prompts"] += prompt_tokens < request.prompt_tokens
        return replace(request, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    requests = tuple(map(fitted, trace.requests))
    words = f"all within a context of {context_tokens} tokens"
    if any(cut.values()):
        words += f" after {cut['prompts']} prompts and {cut['answers']} answers were shortened"
    return _changed(trace, requests, f"{words}: mean {_lengths(requests)}")


def spread(trace: Trace, batch_s: float, seed: int) -> Trace:
    """Requests that arrive at one and the same moment, spread evenly at random over the `batch_s` that follow it.

    Undoes what coarse time stamps did (Mooncake's are rounded to about 3 s) at the price of invented arrivals.
    """
    _positive("spread", batch_s, "s")
    random = Random(seed)
    arrivals = [request.arrival_s for request in trace.requests]
    requests = []
    moved = 0
    for at, request in enumerate(trace.requests):
        together = _together(arrivals, at)
        moved += together
        delay_s = batch_s * random.random() if together else 0.0
        requests.append(replace(request, arrival_s=request.arrival_s + delay_s))
    ordered = in_order(requests)
    words = f"{moved} requests that arrived together spread over {batch_s:g} s each (seed {seed})"
    return _changed(trace, ordered, words, length_s=max(trace.length_s, ordered[-1].arrival_s))


def _together(arrivals: Sequence[float], at: int) -> bool:
    before = at > 0 and arrivals[at - 1] == arrivals[at]
    return before or (at + 1 < len(arrivals) and arrivals[at + 1] == arrivals[at])


def _busiest_start(arrivals: Sequence[float], length_s: float) -> float:
    """When the window with the most arrivals begins; one begins with an arrival."""
    best_start, most, end = 0.0, 0, 0
    for begin, begin_s in enumerate(arrivals):
        while end < len(arrivals) and arrivals[end] < begin_s + length_s:
            end += 1
        if end - begin > most:
            best_start, most = begin_s, end - begin
    return best_start


def _changed(
    trace: Trace,
    requests: Sequence[TraceRequest],
    words: str,
    *,
    length_s: float | None = None,
    block_tokens: float | None = None,
) -> Trace:
    return replace(
        trace,
        requests=tuple(requests),
        length_s=trace.length_s if length_s is None else length_s,
        block_tokens=trace.block_tokens if block_tokens is None else block_tokens,
        history=(*trace.history, words),
    )


def _lengths(requests: Sequence[TraceRequest]) -> str:
    prompts = sum(request.prompt_tokens for request in requests) / len(requests)
    answers = sum(request.output_tokens for request in requests) / len(requests)
    return f"{prompts:.1f} tokens in, {answers:.1f} out"


def _positive(name: str, value: float, unit: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"a {name} of {value} {unit}".rstrip(), expected="a finite number above 0")
