"""How many requests a second the serving engine shall bear on this machine.

Invariants
- The pace is chosen before anything is compared, once, and is the same alone and shared.
- It is never above what the plan asks for: a fast machine has more to lend, not more to serve.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import aiohttp

from rose.demo.serving_engine import answered
from rose.workload.scaling import Scaling
from rose.workload.trace import Trace

_SAMPLES = 7
_FIRST_TOKEN = 110
"""Prompts differ in it, so that none is in the prefix cache."""


def paced(scaling: Scaling, request_s: float, share: float) -> Scaling:
    """The scaling at a rate that makes requests of `request_s` each take `share` of the time, or at its own.

    Requests that are served together cost less than one after the other, so what they take in the end is less.
    """
    assert scaling.rate_rps is not None
    return replace(scaling, rate_rps=round(min(scaling.rate_rps, share / request_s), 3))


async def request_seconds(url: str, load: Trace) -> float:
    """What one request of the load's mean lengths takes when nobody else asks, in seconds: the median of some.

    Raises EngineError if one is not answered. Has no deadline of its own.
    """
    count = len(load.requests)
    prompt_tokens = round(sum(one.prompt_tokens for one in load.requests) / count)
    output_tokens = round(sum(one.output_tokens for one in load.requests) / count)
    took_s = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for sample in range(_SAMPLES):
            began_s = time.monotonic()
            await answered(session, url, [_FIRST_TOKEN + sample] * prompt_tokens, output_tokens)
            took_s.append(time.monotonic() - began_s)
    return median(took_s)
