"""Continuous task batching against vLLM's default order, on a real engine: prefix hits and tokens per second.

One run is one round: the same tasks, played as vLLM takes them with 0.75 to 3 times as many open as its KV memory holds
at once, and as the scheduler says with 1, 2, 4 and 8 times as many. Every play has an engine of its own, and the order
of plays is drawn anew in each round.

In a *working set* of 4 tasks are open whose contexts are four times the KV memory. The baseline of a working set is
the best number of open tasks up to it, over all rounds. Of prompt tokens only those can be found in a cache that were
computed before: `findable` is their share, and no order finds more.
"""

from __future__ import annotations

import asyncio
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from statistics import median

from bench.kv_play import Batched, FirstCome, Played, play
from bench.kv_site import BLOCK_TOKENS, open_engines, open_site
from bench.kv_tasks import MIXES, Mix, Task, findable_share, tasks_of, working_set_tokens
from bench.registry import Bench
from bench.result import Run, Target
from bench.stats import MIN_PAIRS, paired_ratio

FIT = 48
"""Tasks whose contexts fill the KV memory."""
WORKING_SETS = (1, 2, 4, 8)
OPEN = (0.75, 1, 1.5, 2, 3)
"""What the baseline has open, as multiples of that."""
HIT_RATE_RATIO = 1.58

_rounds: list[Mapping[str, Played]] = []


def measure(arguments: Namespace, index: int) -> Run:
    if index == 0:
        _rounds.clear()
    mix = MIXES[arguments.mix]
    tasks = tasks_of(mix, index)
    found = asyncio.run(_round(tasks, _kv_tokens(mix), index))
    _rounds.append(found)
    findable = findable_share(tasks, BLOCK_TOKENS)
    run = {**_figures(found), "tasks": len(tasks), "findable": findable}
    return {**run, **compared(_rounds, findable)} if index == arguments.runs - 1 else run


async def _round(tasks: Sequence[Task], kv_tokens: int, index: int) -> dict[str, Played]:
    names = [*(f"first_come_{share:g}x" for share in OPEN), *(f"batched_{size}x" for size in WORKING_SETS)]
    found: dict[str, Played] = {}
    async with open_engines(kv_tokens) as engine:
        for name in random.Random(index).sample(names, len(names)):
            async with open_site(engine) as site:
                order = FirstCome() if name.startswith("first") else Batched()
                found[name] = await play(site, tasks, round(FIT * _times(name)), order)
    return found


def compared(rounds: Sequence[Mapping[str, Played]], findable: float) -> Run:
    """Of all rounds: each working set against the best that the baseline can do with as many tasks or fewer.

    The figures of a working set of 4 have no name of one. Intervals are 95 %, of rounds drawn anew.
    """
    figures: dict[str, float | None] = {}
    for size in WORKING_SETS:
        baselines = [f"first_come_{share:g}x" for share in OPEN if share <= size]
        best = max(baselines, key=lambda name: median(played[name].tok_s for played in rounds))
        ours, theirs = [played[f"batched_{size}x"] for played in rounds], [played[best] for played in rounds]
        base_hits = median(played.hit_rate for played in theirs)
        hits = median(one.hit_rate / other.hit_rate for one, other in zip(ours, theirs, strict=True))
        tok_s = median(one.tok_s / other.tok_s for one, other in zip(ours, theirs, strict=True))
        of_size: dict[str, float | None] = {
            "baseline_open": _times(best),
            "throughput_ratio": tok_s,
            "hit_rate_ratio": hits,
            "hit_rate_of_target": hits / min(HIT_RATE_RATIO, findable / base_hits),
        }
        if len(rounds) >= MIN_PAIRS:
            interval = paired_ratio([one.tok_s for one in ours], [one.tok_s for one in theirs])
            of_size |= {"throughput_ratio_low": interval.low, "throughput_ratio_high": interval.high}
        figures |= {f"{name}_{size}x": value for name, value in of_size.items()}
        figures |= of_size if size == 4 else {}
    return figures


def _figures(found: Mapping[str, Played]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for name, played in found.items():
        figures |= {f"tok_s_{name}": played.tok_s, f"hit_rate_{name}": played.hit_rate}
        figures[f"preempted_{name}"] = played.preempted
    return figures


def _times(name: str) -> float:
    return float(name.rsplit("_", 1)[1].removesuffix("x"))


def _kv_tokens(mix: Mix) -> int:
    """The same in all rounds."""
    tasks = tasks_of(mix, 0)
    return round(FIT * working_set_tokens(tasks) / len(tasks))


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--mix", default="steady", choices=sorted(MIXES), help="what tasks are like (default: steady)")


BENCH = Bench(
    name="kv",
    summary="continuous task batching against vLLM's default order, on a real engine without enough KV memory",
    headline=(
        *("throughput_ratio", "throughput_ratio_low", "throughput_ratio_high", "hit_rate_ratio", "hit_rate_of_target"),
        *("throughput_ratio_1x", "throughput_ratio_2x", "throughput_ratio_8x"),
        *("hit_rate_ratio_1x", "hit_rate_ratio_2x", "hit_rate_ratio_8x", "findable", "baseline_open"),
    ),
    targets=(
        Target("throughput_ratio", ">=", 1.15),
        Target("hit_rate_of_target", ">=", 1.0),
        Target("throughput_ratio_1x", ">=", 0.98),
        Target("hit_rate_ratio_1x", ">=", 0.98),
    ),
    measure=measure,
    add_arguments=add_arguments,
    left_out=lambda arguments: {},
    runs=5,
)
