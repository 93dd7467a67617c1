"""How long the serving engine of this machine takes for a request, of which its pace follows."""

from __future__ import annotations

import time
from statistics import median

import aiohttp

from rose.demo.serving_engine import answered
from rose.workload.trace import Trace

_SAMPLES = 7
_FIRST_TOKEN = 110
"""Prompts differ in it, so that none is in the prefix cache."""


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
