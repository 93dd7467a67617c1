"""The knobs of continuous task batching, each swept on virtual time: vLLM's own scheduler, the product's own core.

Every figure is of a mix of tasks at a working set of 4 times the KV memory, and a ratio to the best that vLLM's default
order does with any number of open tasks. Steps cost what they were found to cost in `kv`'s engine.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace

from bench.kv import FIT, OPEN
from bench.kv_tasks import CONTEXT_TOKENS, MIXES, tasks_of, working_set_tokens
from bench.registry import Bench
from bench.result import Run, Target
from rose_scheduler.batching import Batching
from rose_scheduler.task_order import Weights

WORKING_SET = 4
_DEFAULT = Batching()
_GROUP, _CONTEXT = 8, CONTEXT_TOKENS
_WEIGHTS = Weights.as_lexicographic(_GROUP, _CONTEXT)

KNOBS: Mapping[str, Batching] = {
    "default": _DEFAULT,
    **{f"gain_{gain:g}": replace(_DEFAULT, gain=gain) for gain in (0.0, 0.06, 0.12, 0.5, 1.0, 4.0)},
    **{f"urgent_after_{share:g}": replace(_DEFAULT, urgent_after=share) for share in (0.01, 0.1, 1.0)},
    "weights_as_lexicographic": replace(_DEFAULT, order=_WEIGHTS),
    "weights_completion_0": replace(_DEFAULT, order=replace(_WEIGHTS, completion=0.0)),
    "weights_active_0": replace(_DEFAULT, order=replace(_WEIGHTS, active=0.0)),
    "weights_context_0": replace(_DEFAULT, order=replace(_WEIGHTS, context=0.0)),
    "weights_waited_0.1": replace(_DEFAULT, order=replace(_WEIGHTS, waited=0.1)),
    "weights_waited_10": replace(_DEFAULT, order=replace(_WEIGHTS, waited=10.0)),
}


def measure(arguments: Namespace, index: int) -> Run:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    figures: dict[str, float | None] = {}
    for mix in MIXES:
        figures |= _of_mix(mix, index)
    ratios = [figures[f"throughput_{mix}_default"] for mix in MIXES]
    figures["throughput_ratio_least"] = min(ratio for ratio in ratios if ratio is not None)
    return figures


def _of_mix(mix: str, seed: int) -> dict[str, float | None]:
    from bench.kv_virtual import Batched, FirstCome
    from bench.kv_virtual_engine import VirtualEngine

    tasks = tasks_of(MIXES[mix], seed)
    kv_tokens = round(FIT * working_set_tokens(tasks) / len(tasks))
    baselines = [
        FirstCome(VirtualEngine(kv_tokens), tasks, round(FIT * share)).run() for share in OPEN if share <= WORKING_SET
    ]
    best = max(baselines, key=lambda outcome: outcome.tok_s)
    figures: dict[str, float | None] = {f"tok_s_{mix}_baseline": best.tok_s, f"hit_rate_{mix}_baseline": best.hit_rate}
    for name, batching in KNOBS.items():
        outcome = Batched(VirtualEngine(kv_tokens), tasks, FIT * WORKING_SET, kv_tokens, batching).run()
        figures[f"throughput_{mix}_{name}"] = outcome.tok_s / best.tok_s
        figures[f"hit_rate_{mix}_{name}"] = outcome.hit_rate / best.hit_rate
        figures[f"group_s_{mix}_{name}"] = outcome.group_s
    return figures


BENCH = Bench(
    name="kv_sweep",
    summary="the knobs of continuous task batching, swept on virtual time",
    headline=("throughput_ratio_least", *(f"throughput_{mix}_default" for mix in MIXES)),
    targets=(Target("throughput_ratio_least", ">=", 0.95),),
    measure=measure,
    add_arguments=lambda parser: None,
    left_out=lambda arguments: {},
    runs=3,
)
