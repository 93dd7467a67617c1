"""Throw broken deltas at the parser: `./dev python -m bench.codec_fuzz --cases 10000000 --seed 1`.

Each case takes a sound delta, breaks it in up to four places and repairs the checksum most of the time, so that the
damage gets past it. It passes if the parser refuses with MalformedDelta, or accepts what can then be applied, undone
and composed like any other; every 64th is also read by the NumPy kernels, which must agree. Reads outside the input
show as a crash, or without fail where the library was built with -fsanitize=address.
"""

from __future__ import annotations

import random
import struct
import time
from argparse import ArgumentParser
from collections import Counter
from contextlib import suppress

import numpy as np
import xxhash

from rose_transfer.codec import MalformedDelta, WrongBase, encode, from_wire, overwrite
from rose_transfer.codec.kernels import Kernels, best_kernels
from rose_transfer.codec.numpy_kernels import NumpyKernels
from rose_transfer.codec.wire import BODY_AT, CHECKSUM, HEADER

COMPARED_EVERY = 64
SHOWN_EVERY_S = 10.0
"""Interesting integers, put over whole fields."""
NUMBERS = (0, 1, 2, 0xFF, 0x100, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63, 2**64 - 1)


def sound_deltas(seed: int) -> list[bytes]:
    """Deltas of all forms, for buckets of one short tile up to two tiles."""
    rng = np.random.default_rng(seed)
    found: list[bytes] = []
    for elements in (1, 40, 700, 66000):
        for dtype in (np.uint16, np.uint32):
            old = rng.integers(0, np.iinfo(dtype).max, elements, dtype=dtype)
            for share, reach in ((0.0, 1), (0.003, 2), (0.02, 200), (0.3, 3), (0.95, 4), (0.5, 60000)):
                new = old.copy()
                at = np.flatnonzero(rng.random(elements) < share)
                new[at] += rng.integers(1, reach, at.size, endpoint=True).astype(dtype)
                delta = encode(old, new, 0)
                found += [delta.to_wire(), delta.to_wire(compress=True)]
            found.append(overwrite(old, int(rng.integers(0, 2**63))).to_wire())
    return [data for data in found if len(data) < 40_000]


def broken(data: bytes, source: random.Random) -> bytes:
    """`data` with one to four damages, mostly with a checksum that fits them."""
    damaged = bytearray(data)
    for _ in range(source.randint(1, 4)):
        _damage(damaged, source)
    if len(damaged) >= BODY_AT and source.random() < 0.8:
        _repair_size(damaged, len(damaged) - len(data), source.randrange(4))
    if len(damaged) >= BODY_AT and source.random() < 0.95:
        digest = xxhash.xxh3_64(damaged[: HEADER.size])
        digest.update(memoryview(damaged)[BODY_AT:])
        CHECKSUM.pack_into(damaged, HEADER.size, digest.intdigest())
    return bytes(damaged)


def _repair_size(data: bytearray, grown: int, part: int) -> None:
    """Let the header's sizes of one part (0 the rows) allow for the bytes that came or went."""
    places = (44 + 4 * part,) if part == 0 else (44 + 4 * part, 28 + 4 * part)
    for at in places:
        size = int.from_bytes(data[at : at + 4], "little") + grown
        data[at : at + 4] = (size % 2**32).to_bytes(4, "little")


def _damage(data: bytearray, source: random.Random) -> None:
    if not data:
        return
    # One in eight goes to the header, where it is soon found; the first rows decide most and get three.
    begin, end = source.choice(((0, BODY_AT), *[(BODY_AT, BODY_AT + 40)] * 3, *[(BODY_AT, len(data))] * 4))
    begin = min(begin, len(data) - 1)
    at = source.randrange(begin, max(begin + 1, min(end, len(data))))
    kind = source.randrange(6)
    if kind == 0:
        data[at] ^= 1 << source.randrange(8)
    elif kind == 1:
        data[at] = source.choice((0, 1, 14, 15, 16, 0x7F, 0x80, 0xF0, 254, 255, source.randrange(256)))
    elif kind == 2:
        width, code = source.choice(((2, "<H"), (4, "<I"), (8, "<Q")))
        at = min(at - at % 4, max(0, len(data) - width))
        number = (source.choice(NUMBERS) + source.randint(-1, 1)) % 256**width
        data[at : at + width] = struct.pack(code, number)
    elif kind == 3:
        del data[at : at + source.choice((1, 2, 4, 100, len(data)))]
    elif kind == 4:
        data[at:at] = source.randbytes(source.choice((1, 2, 4, 100)))
    else:
        other = source.randrange(len(data))
        size = source.randrange(1, 16)
        data[at : at + size] = data[other : other + size]


def verdict(data: bytes, kernels: Kernels) -> str:
    """What became of it: what was wrong with it in a few words, or "accepted"."""
    try:
        delta = from_wire(data, kernels=kernels)
    except MalformedDelta as error:
        return " ".join(word for word in error.what.split() if word.isalpha())
    target = np.zeros(delta.elements, dtype=f"<u{delta.lane}")
    for backwards in (False, True):
        with suppress(WrongBase):
            delta.apply_tiles(target, 0, delta.tiles, backwards=backwards, kernels=kernels)
    twice = kernels.compose(delta.streams, delta.streams, delta.elements, delta.lane, delta.mode)
    assert kernels.inspect(twice, delta.elements, delta.lane, delta.mode) is None, f"composed to nonsense: {data!r}"
    return "accepted"


def fuzz(cases: int, seed: int, kernels: Kernels, *, told_every_s: float = float("inf")) -> Counter[str]:
    """How often which verdict was given. Raises whatever is not a refusal, and AssertionError if kernels disagree."""
    source = random.Random(seed)
    deltas = sound_deltas(seed)
    plain = NumpyKernels()
    verdicts: Counter[str] = Counter()
    told = time.monotonic()
    for case in range(cases):
        data = broken(source.choice(deltas), source)
        found = verdict(data, kernels)
        verdicts[found] += 1
        if case % COMPARED_EVERY == 0:
            other = verdict(data, plain)
            assert (other == "accepted") == (found == "accepted"), f"{kernels.name}: {found}; numpy: {other}; {data!r}"
        if time.monotonic() - told > told_every_s:
            told = time.monotonic()
            print(f"{case + 1} cases, {verdicts['accepted']} accepted", flush=True)
    return verdicts


def main() -> None:
    parser = ArgumentParser(prog="python -m bench.codec_fuzz", description="Throw broken deltas at the parser.")
    parser.add_argument("--cases", type=int, default=100_000, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="where to begin (%(default)s)")
    arguments = parser.parse_args()
    verdicts = fuzz(arguments.cases, arguments.seed, best_kernels(), told_every_s=SHOWN_EVERY_S)
    for words, count in verdicts.most_common():
        print(f"{count:>10}  {words}")


if __name__ == "__main__":
    main()
