"""What a bench is, and which there are."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.result import Run, Target
from rose.errors import RoseError


class BenchFailed(RoseError):
    """What was to be measured did not run; nothing is written."""

    boundary = "bench"


@dataclass(frozen=True, slots=True)
class Bench:
    """`measure(arguments, index)` makes run `index` (from 0) and returns its figures; it raises BenchFailed.

    `left_out(arguments)` names the figures that the arguments leave out, each with the reason.
    """

    name: str
    summary: str
    headline: Sequence[str]
    targets: Sequence[Target]
    measure: Callable[[Namespace, int], Run]
    add_arguments: Callable[[ArgumentParser], None]
    left_out: Callable[[Namespace], dict[str, str]]
    runs: int


def benches() -> dict[str, Bench]:
    """All benches by name."""
    from bench import codec, coserve_demo, coserving, kv, kv_sweep, rdma_choice, transfer

    modules = (coserve_demo, coserving, kv, kv_sweep, codec, transfer, rdma_choice)
    return {module.BENCH.name: module.BENCH for module in modules}
