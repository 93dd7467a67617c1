"""Our transfer alone at several sizes and densities, for the projection: medians over versions of which each is new.

The points take turns, so that what else the machine does hits all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median

from bench.link import ShapedLink
from bench.transfer_methods import OURS
from bench.transfer_model import BUCKETS, MODEL_BYTES
from bench.transfer_projection import Point
from bench.transfer_rounds import STEP_TIMEOUT_S, Ends, ends_of

FITTED = ((1, 0.3), (1, 3.0), (BUCKETS, 0.3), (BUCKETS, 3.0))
"""Buckets and percent changed: the model is fitted to these."""
HELD_OUT = ((BUCKETS // 2, 1.0), (BUCKETS, 1.0))
REPEATED = 5


def measure_points(link: ShapedLink, index: int) -> dict[tuple[int, float], Point]:
    """Every point of FITTED and HELD_OUT. Raises BenchFailed."""
    wanted = (*FITTED, *HELD_OUT)
    found: dict[tuple[int, float], list[Mapping[str, float]]] = {point: [] for point in wanted}
    with ExitStack() as stack:
        ends = {buckets: stack.enter_context(ends_of(link, buckets)) for buckets in {size for size, _ in wanted}}
        for turn in range(REPEATED):
            for number, (buckets, percent) in enumerate(wanted):
                seed = 10_000 * (index + 1) + 100 * turn + number
                found[buckets, percent].append(_transfer(ends[buckets], percent, seed))
    return {(buckets, percent): _point(buckets, made) for (buckets, percent), made in found.items()}


def _transfer(ends: Ends, percent: float, seed: int) -> dict[str, float]:
    made = ends.sender.ask("change", percent / 100, seed, timeout_s=STEP_TIMEOUT_S)
    return ends.transfer(OURS, made["hashes"]) | {"changed": made["changed"]}


def _point(buckets: int, made: list[Mapping[str, float]]) -> Point:
    middle = {name: median(one[name] for one in made) for name in made[0]}
    return Point(
        model_bytes=MODEL_BYTES * buckets / BUCKETS,
        changed=middle["changed"],
        sent_bytes=middle["bytes"],
        buckets=buckets,
        seconds=middle["s"],
        publish_s=middle["publish_s"],
        apply_s=middle["apply_s"],
    )
