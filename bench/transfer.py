"""The weight transfer, side by side with what others do: seconds on a slow link, bytes, and what a real model costs.

One run is one interleaved round of every part. Parts, to be chosen with --only:

    link     512 MiB over 1 Gb/s between two network namespaces: see `transfer_rounds`; needs root
    wan      bytes on that link for one and for eight receivers behind it: see `transfer_wan`; needs root
    codec    one bucket, one core: see `codec`; on pairs of versions from training once, in the first run
    smollm   a real model's optimiser steps: see `smollm`; once, in the first run; needs a package from PyPI

`projected_*` are no measurements: see `transfer_projection`. `projection_error` is how far that model is off at 1 %,
having been fitted at 0.3 and 3 %.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from bench import codec, smollm_package
from bench.link import link_missing
from bench.registry import Bench
from bench.result import Run, Target
from bench.transfer_methods import OURS
from bench.transfer_model import BUCKETS, MODEL_BYTES
from bench.transfer_projection import Costs, Point, fitted, projected_s
from bench.transfer_rounds import LINK_BITS_PER_S, link_bytes_per_s, one_round

PARTS = ("link", "wan", "codec", "smollm")
NAMED = {"dense": "dense", "xor_zstd": "xor_zstd", "index32": "idx32", "gap_xor_zstd": "gap_xor_zstd", "gloo": "gloo"}
"""Sides by the name that the headline has for them, at 1 %."""

SMOLLM_RATES = ("1e-6", "1e-5")
LARGER = {"8b_10gbps": (16.06e9, 10e9, 8), "235b_100gbps": (470e9, 100e9, 64)}
"""Bytes of weights, bits per second and cores at each end."""

FIGURES = {
    "link": (
        *(f"vs_{name}" for name in NAMED.values()),
        "s_rose_1pct",
        "s_dense",
        "projection_error",
        *(f"projected_{name}_s" for name in LARGER),
    ),
    "wan": ("wan_bytes_1_replica", "wan_bytes_8_replicas", "wan_bytes_ratio", "bytes_per_receiver_ratio"),
    "codec": codec.BENCH.headline,
    "smollm": tuple(f"smollm_bytes_per_changed_{rate}" for rate in SMOLLM_RATES),
}
"""Headline figures by the part that they come from."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--only", type=_parts, default=PARTS, metavar="PART,...", help=f"measure these parts alone: {', '.join(PARTS)}"
    )


def left_out(arguments: Namespace) -> dict[str, str]:
    return {figure: why for part in PARTS if (why := _missing(part, arguments)) for figure in FIGURES[part]}


def measure(arguments: Namespace, index: int) -> Run:
    """One round of every part that was asked for and can be measured here. Raises BenchFailed."""
    figures: dict[str, float | None] = {}
    parts = [part for part in PARTS if not _missing(part, arguments)]
    if "link" in parts:
        figures |= measure_link(index)
    if "wan" in parts:
        from bench.transfer_wan import wan_figures

        figures |= wan_figures()
    if "codec" in parts:
        figures |= codec.measure(Namespace(skip_rl=index > 0), index)
    if "smollm" in parts and index == 0:
        from bench import smollm

        figures |= smollm.figures(SMOLLM_RATES)
    return figures


def measure_link(index: int) -> dict[str, float | None]:
    """One round on the link, and what follows from it."""
    figures = one_round(index)
    figures |= {f"vs_{name}": figures[f"vs_{side}_1pct"] for side, name in NAMED.items()}
    sparse, middle, dense = (_point(figures, name) for name in ("0.3pct", "1pct", "3pct"))
    costs = fitted(MODEL_BYTES, sparse, dense, _found(figures, f"link_bytes_per_changed_{OURS}_1pct"))
    rate = link_bytes_per_s(figures)
    told = projected_s(costs, MODEL_BYTES, middle.changed, rate, 1, BUCKETS)
    measured = _found(figures, f"s_{OURS}_1pct")
    return figures | {"projection_error": abs(told - measured) / measured} | _larger(costs, rate)


def _larger(costs: Costs, rate: float) -> dict[str, float]:
    """1 % of a larger model changed, on a link that is used as well as ours was."""
    used = rate / (LINK_BITS_PER_S / 8)
    found: dict[str, float] = {}
    for name, (model_bytes, bits_per_s, cores) in LARGER.items():
        changed, buckets = 0.01 * model_bytes / 2, max(1, round(model_bytes / MODEL_BYTES * BUCKETS / cores))
        link = used * bits_per_s / 8
        found[f"projected_{name}_s"] = projected_s(costs, model_bytes, changed, link, cores, buckets)
        found[f"projected_dense_{name}_s"] = model_bytes / link
    return found


def _point(figures: Run, name: str) -> Point:
    return Point(
        _found(figures, f"changed_elements_{name}"),
        _found(figures, f"publish_s_{name}"),
        _found(figures, f"apply_s_{name}"),
    )


def _found(figures: Run, name: str) -> float:
    value = figures[name]
    assert value is not None
    return value


def _missing(part: str, arguments: Namespace) -> str:
    if part not in arguments.only:
        return f"left out with --only {','.join(arguments.only)}"
    if part in ("link", "wan"):
        return link_missing()
    return smollm_package.missing() if part == "smollm" else ""


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise ArgumentTypeError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return parts


BENCH = Bench(
    name="transfer",
    summary="the weight transfer over a slow link, beside what others do; bytes per changed weight; codec speed",
    headline=tuple(figure for part in PARTS for figure in FIGURES[part]),
    targets=(
        Target("vs_dense", ">=", 9),
        Target("vs_xor_zstd", ">=", 2),
        Target("wan_bytes_ratio", "<=", 1.02),
        *codec.BENCH.targets,
        *(Target(f"smollm_bytes_per_changed_{rate}", "<=", 1.5) for rate in SMOLLM_RATES),
    ),
    measure=measure,
    add_arguments=add_arguments,
    left_out=left_out,
    runs=3,
)
