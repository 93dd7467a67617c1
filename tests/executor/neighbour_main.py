"""A neighbour whose memory grows and shrinks without pause, until it is killed: `neighbour_main.py MIB`."""

from __future__ import annotations

import mmap
import sys


def main() -> None:
    size = int(sys.argv[1]) * 2**20
    print("begins", flush=True)
    while True:
        held = mmap.mmap(-1, size)
        for at in range(0, size, mmap.PAGESIZE):
            held[at] = 1
        held.close()


main()
