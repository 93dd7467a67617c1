"""The weight transfer, side by side with what others do: seconds on a slow link, bytes, and what a real model costs.

One run is one interleaved round of every part; those whose figures do not change take part in the first run alone.
Parts, to be chosen with --only:

    link     512 MiB over 1 Gb/s between two network namespaces: see `transfer_rounds`; needs root
    wan      bytes on that link for one and for eight receivers behind it: see `transfer_wan`; needs root
    codec    one bucket, one core, and pairs of versions from training: see `codec`
    smollm   a real model's optimiser steps: see `smollm`; needs a package from PyPI
    live     updates of a live engine: see `live_update`

`projected_*` are no measurements: see `transfer_projection`. `projection_error_*` is how far that model is off at
points that it was not fitted to (see `transfer_points`), `projection_error` the larger of these.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import codec, smollm_package
from bench.link import link_missing, shaped_link
from bench.registry import Bench
from bench.result import Run, Target
from bench.transfer_model import BUCKETS, MODEL_BYTES
from bench.transfer_points import FITTED, HELD_OUT, measure_points
from bench.transfer_projection import Costs, error, fitted
from bench.transfer_rounds import LINK_BITS_PER_S, link_bytes_per_s, one_round
from rose_transfer.codec import BUCKET_BYTES_MAX, TILE_ELEMENTS
from rose_transfer.store.at_once import AT_ONCE

NAMED = {"dense": "dense", "xor_zstd": "xor_zstd", "index32": "idx32", "gap_xor_zstd": "gap_xor_zstd", "gloo": "gloo"}
"""Sides by the name that the headline has for them, at 1 %."""

SMOLLM_RATES = ("1e-6", "1e-5")
LIVE_HEADLINE = (
    *("pause_ms", "recompute_pause_ms", "dense_pause_ms", "peak_extra_bytes"),
    *("unpacked_cost_batch_1", "unpacked_cost_batch_8"),
)
EXTRA_BYTES_MAX = 2 * BUCKET_BYTES_MAX + TILE_ELEMENTS * 2
"""Two buckets and one tile of bfloat16."""
LARGER = {"8b_10gbps": (16.06e9, 10e9, 8), "235b_100gbps": (470e9, 100e9, 64)}
"""Bytes of weights, bits per second and cores at each end."""


@dataclass(frozen=True, slots=True)
class Part:
    """`measure(index)` makes run `index`; `missing` says why it cannot here, empty if it can."""

    headline: Sequence[str]
    measure: Callable[[int], Run]
    missing: Callable[[], str]
    first_run_only: bool = False


def measure_wan(index: int) -> Run:
    from bench.transfer_wan import wan_figures  # imports torch, as the next one does

    return wan_figures()


def measure_codec(index: int) -> Run:
    return codec.measure(Namespace(skip_rl=index > 0), index)


def measure_smollm(index: int) -> Run:
    from bench import smollm

    return smollm.figures(SMOLLM_RATES)


def measure_live(index: int) -> Run:
    from bench import live_update

    return live_update.measure()


def measure_link(index: int) -> dict[str, float | None]:
    """One round on the link, the points for the projection, and what follows from both."""
    figures = one_round(index)
    figures |= {f"vs_{name}": figures[f"vs_{side}_1pct"] for side, name in NAMED.items()}
    rate = link_bytes_per_s(figures)
    with shaped_link(LINK_BITS_PER_S) as link:
        points = measure_points(link, index)
    costs = fitted([points[at] for at in FITTED], rate)
    figures |= {f"point_s_{buckets}_buckets_{percent:g}pct": at.seconds for (buckets, percent), at in points.items()}
    errors = {at: error(costs, points[at], rate) for at in HELD_OUT}
    figures |= {f"projection_error_{buckets}_buckets_{percent:g}pct": off for (buckets, percent), off in errors.items()}
    return figures | {"projection_error": max(errors.values())} | _larger(costs, rate)


def _larger(costs: Costs, rate: float) -> dict[str, float]:
    """1 % of a larger model changed, on a link that is used as well as ours was."""
    used = rate / (LINK_BITS_PER_S / 8)
    published_on = min(AT_ONCE, len(os.sched_getaffinity(0)))
    found: dict[str, float] = {}
    for name, (model_bytes, bits_per_s, cores) in LARGER.items():
        changed, buckets = 0.01 * model_bytes / 2, max(1, round(model_bytes / MODEL_BYTES * BUCKETS / cores))
        link = used * bits_per_s / 8
        found[f"projected_{name}_s"] = costs.seconds(model_bytes, changed, buckets, link, (cores / published_on, cores))
        found[f"projected_dense_{name}_s"] = model_bytes / link
    return found


def _nothing_missing() -> str:
    return ""


PARTS = {
    "link": Part(
        (
            *(f"vs_{name}" for name in NAMED.values()),
            "s_rose_1pct",
            "s_dense",
            "projection_error",
            *(f"projected_{name}_s" for name in LARGER),
        ),
        measure_link,
        link_missing,
    ),
    "wan": Part(
        ("wan_bytes_1_replica", "wan_bytes_8_replicas", "wan_bytes_ratio", "bytes_per_receiver_ratio"),
        measure_wan,
        link_missing,
        first_run_only=True,
    ),
    "codec": Part(codec.BENCH.headline, measure_codec, _nothing_missing),
    "smollm": Part(
        tuple(f"smollm_bytes_per_changed_{rate}" for rate in SMOLLM_RATES),
        measure_smollm,
        smollm_package.missing,
        first_run_only=True,
    ),
    "live": Part(LIVE_HEADLINE, measure_live, _nothing_missing, first_run_only=True),
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        type=_parts,
        default=tuple(PARTS),
        metavar="PART,...",
        help=f"measure these parts alone: {', '.join(PARTS)}",
    )


def left_out(arguments: Namespace) -> dict[str, str]:
    return {
        figure: why for name, part in PARTS.items() if (why := _missing(name, arguments)) for figure in part.headline
    }


def measure(arguments: Namespace, index: int) -> Run:
    """One round of every part that was asked for and can be measured here. Raises BenchFailed."""
    figures: dict[str, float | None] = {}
    for name, part in PARTS.items():
        if not _missing(name, arguments) and not (index and part.first_run_only):
            figures |= part.measure(index)
    return figures


def _missing(name: str, arguments: Namespace) -> str:
    if name not in arguments.only:
        return f"left out with --only {','.join(arguments.only)}"
    return PARTS[name].missing()


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise ArgumentTypeError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return parts


BENCH = Bench(
    name="transfer",
    summary="the weight transfer over a slow link, beside what others do; bytes per changed weight; codec speed",
    headline=tuple(figure for part in PARTS.values() for figure in part.headline),
    targets=(
        Target("vs_dense", ">=", 9),
        Target("vs_xor_zstd", ">=", 2),
        Target("wan_bytes_ratio", "<=", 1.02),
        Target("projection_error", "<=", 0.1),
        *codec.BENCH.targets,
        Target("pause_ms", "<=", 200),
        Target("peak_extra_bytes", "<=", EXTRA_BYTES_MAX),
        *(Target(f"smollm_bytes_per_changed_{rate}", "<=", 1.5) for rate in SMOLLM_RATES),
    ),
    measure=measure,
    add_arguments=add_arguments,
    left_out=left_out,
    runs=3,
)
