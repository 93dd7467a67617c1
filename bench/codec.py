"""The delta codec: bytes per changed element, and speed against reading the two versions at all.

One bucket of 64 MiB of bfloat16. Changes are as training makes them (nine of ten by one step, geometric), on 0.3, 1, 3
and 20 % of the elements. Times are those of the one thread that works (its CPU time, so that others on the machine
count less); all sides take turns in each round, and a figure is the median over the rounds. *Scan* is the C library's
memcmp of the old version with a copy of it, all 64 MiB: what no encoder that compares two versions can beat.
Speeds are in GB/s of dense weights. Every peer and every form is checked to give the new bits exactly.

`rl_*` are on pairs of versions that GRPO made of the demo's model (see codec_rl): at the demo's own settings, and at
the rates 1e-5 and 1e-6 with Adam's usual epsilon, as large models are trained.
"""

from __future__ import annotations

import ctypes
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from bench.codec_peers import PEERS
from bench.codec_versions import Bits, trained, weights
from bench.registry import Bench, BenchFailed
from bench.result import Run, Target
from rose_transfer.codec import BUCKET_BYTES_MAX, bucket_hash, encode, from_wire
from rose_transfer.codec.kernels import Kernels
from rose_transfer.codec.native import native_kernels
from rose_transfer.codec.numpy_kernels import NumpyKernels

ROUNDS = 11
SLOW_ROUNDS = 3
"""For sides in NumPy, which take a hundred times as long."""
PERCENT_CHANGED = (0.3, 1.0, 3.0, 20.0)
PEERS_AT = 1.0
RL = {"demo": (2e-4, 1e-4), "1e-5": (1e-5, 1e-8), "1e-6": (1e-6, 1e-8)}
"""Learning rate and Adam's epsilon by the name in the figure."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--skip-rl", action="store_true", help="leave out the pairs from training (a minute)")


def left_out(arguments: Namespace) -> dict[str, str]:
    return {f"rl_bytes_per_changed_{name}": "left out with --skip-rl" for name in RL} if arguments.skip_rl else {}


def measure(arguments: Namespace, index: int) -> Run:
    """One run; the pairs from training are the same each time and only looked at in the first.

    Raises BenchFailed if the native kernels are missing or a delta is not exact.
    """
    if not native_kernels():
        raise BenchFailed("the codec's native library was not built", to_do="install a C compiler, then rose again")
    rng = np.random.default_rng(index)
    old = weights(BUCKET_BYTES_MAX // 2, rng)
    figures: dict[str, float | None] = {}
    for percent in PERCENT_CHANGED:
        figures |= measure_density(old, trained(old, percent / 100, rng), f"{percent:g}pct")
    figures |= measure_others(old, trained(old, PEERS_AT / 100, rng))
    figures["encode_fraction_raw"] = min(_number(figures[f"encode_fraction_raw_{name}"]) for name in ("0.3pct", "1pct"))
    figures["encode_fraction_zstd"] = min(
        _number(figures[f"encode_fraction_zstd_{name}"]) for name in ("0.3pct", "1pct")
    )
    if index == 0 and not arguments.skip_rl:
        for name, (learning_rate, epsilon) in RL.items():
            figures |= measure_training(name, learning_rate, epsilon)
    return figures


def measure_density(old: Bits, new: Bits, name: str) -> dict[str, float | None]:
    """Ours on one density, raw and compressed."""
    before = bucket_hash(old)
    delta = encode(old, new, before)
    raw, zstd = delta.to_wire(), delta.to_wire(compress=True)
    same, target = old.copy(), old.copy()
    scan = _scanner(old, same)

    def receive(data: bytes) -> Callable[[], None]:
        def read_and_apply() -> None:
            from_wire(data).apply(target, before)

        return read_and_apply

    def restore() -> None:
        np.copyto(target, old)

    for data in (raw, zstd):
        restore()
        receive(data)()
        _must_equal(target, new, f"our delta at {name}")
    seconds = _take_turns(
        {
            "scan": (_nothing, scan),
            "encode_raw": (_nothing, lambda: encode(old, new, before).to_wire()),
            "encode_zstd": (_nothing, lambda: encode(old, new, before).to_wire(compress=True)),
            "decode_raw": (restore, receive(raw)),
            "decode_zstd": (restore, receive(zstd)),
        },
        ROUNDS,
    )
    changed = int(np.count_nonzero(old != new))
    return {
        f"changed_{name}": changed / old.size,
        f"bytes_per_changed_raw_{name}": len(raw) / changed,
        f"bytes_per_changed_zstd_{name}": len(zstd) / changed,
        f"scan_gb_s_{name}": _gb_s(seconds["scan"]),
        f"encode_gb_s_raw_{name}": _gb_s(seconds["encode_raw"]),
        f"encode_gb_s_zstd_{name}": _gb_s(seconds["encode_zstd"]),
        f"encode_fraction_raw_{name}": _fraction(seconds["scan"], seconds["encode_raw"]),
        f"encode_fraction_zstd_{name}": _fraction(seconds["scan"], seconds["encode_zstd"]),
        f"decode_gb_s_raw_{name}": _gb_s(seconds["decode_raw"]),
        f"decode_gb_s_zstd_{name}": _gb_s(seconds["decode_zstd"]),
    }


def measure_others(old: Bits, new: Bits) -> dict[str, float | None]:
    """Peers' methods, our kernels for lesser machines, and the hash, side by side at 1 %."""
    changed = int(np.count_nonzero(old != new))
    target = old.copy()
    figures: dict[str, float | None] = {}
    sides: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}

    def restore() -> None:
        np.copyto(target, old)

    for peer in PEERS:
        data = peer.encode(old, new)
        restore()
        peer.decode(data, target)
        _must_equal(target, new, peer.method)
        figures[f"peer_{peer.name}_bytes_per_changed"] = len(data) / changed
        sides[f"peer_{peer.name}_encode"] = _nothing, partial(peer.encode, old, new)
        sides[f"peer_{peer.name}_decode"] = restore, partial(peer.decode, data, target)
    every: tuple[Kernels, ...] = (NumpyKernels(), *native_kernels())
    for kernels in every:
        delta = encode(old, new, 0, kernels=kernels)
        sides[f"kernels_{kernels.name}_encode"] = _nothing, partial(encode, old, new, 0, kernels=kernels)
        sides[f"kernels_{kernels.name}_decode"] = restore, partial(delta.apply, target, 0, kernels=kernels)
    sides["hash"] = _nothing, partial(bucket_hash, old)
    seconds = _take_turns(sides, SLOW_ROUNDS)
    return figures | {f"{name}_gb_s": _gb_s(values) for name, values in seconds.items()}


def measure_training(name: str, learning_rate: float, epsilon: float) -> dict[str, float | None]:
    """Bytes per changed element on versions that training made."""
    from bench.codec_rl import training_bucket

    old, new = training_bucket(learning_rate, epsilon)
    delta = encode(old, new, bucket_hash(old))
    target = old.copy()
    from_wire(delta.to_wire(compress=True)).apply(target, delta.before)
    _must_equal(target, new, f"the delta of training at {name}")
    moved = old != new
    steps = np.abs(old[moved].astype(np.int32) - new[moved].astype(np.int32))
    return {
        f"rl_changed_{name}": float(np.mean(moved)),
        f"rl_moved_by_one_{name}": float(np.mean(steps == 1)),
        f"rl_bytes_per_changed_raw_{name}": len(delta.to_wire()) / steps.size,
        f"rl_bytes_per_changed_{name}": len(delta.to_wire(compress=True)) / steps.size,
    } | {f"rl_peer_{peer.name}_{name}": len(peer.encode(old, new)) / steps.size for peer in PEERS}


def _scanner(one: Bits, other: Bits) -> Callable[[], int]:
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return lambda: int(memcmp(one.ctypes.data, other.ctypes.data, one.nbytes))


def _take_turns(sides: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each side's work by round; what comes before it is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (prepare, work) in sides.items():
            prepare()
            begin = time.thread_time()
            work()
            seconds[name].append(time.thread_time() - begin)
    return seconds


def _nothing() -> None:
    pass


def _gb_s(seconds: list[float]) -> float:
    return BUCKET_BYTES_MAX / median(seconds) / 1e9


def _fraction(limit: list[float], seconds: list[float]) -> float:
    """Of the limit's speed, round by round: what slows both down at the time cancels."""
    return median(one / other for one, other in zip(limit, seconds, strict=True))


def _number(value: float | None) -> float:
    assert value is not None
    return value


def _must_equal(found: Bits, wanted: Bits, what: str) -> None:
    if not np.array_equal(found, wanted):
        raise BenchFailed(f"{what} does not give the new bits")


BENCH = Bench(
    name="codec",
    summary="the delta codec: bytes per changed element, speed against a plain scan, and peers' methods beside it",
    headline=(
        "bytes_per_changed_raw_1pct",
        "bytes_per_changed_zstd_1pct",
        "encode_fraction_raw",
        "encode_fraction_zstd",
        "decode_gb_s_zstd_1pct",
        *(f"rl_bytes_per_changed_{name}" for name in RL),
        *(f"peer_{peer.name}_bytes_per_changed" for peer in PEERS),
        "scan_gb_s_1pct",
        "encode_gb_s_raw_1pct",
    ),
    targets=(
        Target("bytes_per_changed_raw_1pct", "<=", 2.1),
        Target("bytes_per_changed_zstd_1pct", "<=", 1.30),
        *(Target(f"rl_bytes_per_changed_{name}", "<=", 1.5) for name in RL),
        Target("encode_fraction_raw", ">=", 0.9),
        Target("encode_fraction_zstd", ">=", 0.75),
        Target("decode_gb_s_zstd_1pct", ">=", 8),
    ),
    measure=measure,
    add_arguments=add_arguments,
    left_out=left_out,
    runs=5,
)
