"""A small model in several buckets, and weights that move as in training."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from rose.simulator.small_model import PACKING, Bits, first_weights, moved
from rose_transfer.store import Step, Store, StoreReader


def same(one: list[Bits], other: list[Bits]) -> bool:
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def publish_line(store: Store, versions: int, *, share: float = 0.1, seed: int = 1) -> dict[int, list[Bits]]:
    """Versions 1 to `versions`, each in steps from the one before; what they hold."""
    history = {1: first_weights(seed)}
    store.publish(1, PACKING, history[1])
    for version in range(2, versions + 1):
        history[version] = moved(history[version - 1], share, seed + version)
        store.publish(version, PACKING, history[version], base=version - 1)
    return history


def changed(weights: list[Bits], share: float, rng: np.random.Generator) -> list[Bits]:
    """Elements with new bits of any kind, each with this probability."""
    made = []
    for bits in weights:
        new = rng.integers(0, 2 ** (8 * bits.itemsize), bits.size, dtype=bits.dtype)
        made.append(np.where(rng.random(bits.size) < share, new, bits))
    return made


def follow(store: StoreReader, steps: tuple[Step, ...], held: list[Bits] | None, start: str | None) -> list[Bits]:
    """What one has who held `held`, with fingerprint `start`, after applying the objects of `steps`."""
    bits = [one.copy() for one in held or []]
    at = start
    for step in steps:
        manifest = step.manifest
        begin, end = manifest.base_fingerprint, manifest.fingerprint
        if manifest.base is None:
            bits = [np.empty(entry.dense_bytes, np.uint8) for entry in manifest.buckets]
        else:
            assert at == (end if step.backwards else begin)
        for index, entry in enumerate(manifest.buckets):
            delta = store.load(manifest, entry)
            bits[index] = bits[index].view(f"<u{delta.lane}")
            if step.backwards:
                delta.undo(bits[index], entry.after)
            else:
                delta.apply(bits[index], entry.before)
        at = begin if step.backwards else end
    return bits


def whole_files(folder: Path) -> set[str]:
    """Everything in a store but its lock, drafts included."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.name != "lock"}


def _socket(path: Path) -> None:
    bound = socket.socket(socket.AF_UNIX)
    here = os.open(path.parent, os.O_RDONLY)
    # By the descriptor of the folder: a socket's address has room for a short path only.
    bound.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)
    bound.close()


def _link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_bytes(b"of somebody")
    path.symlink_to(elsewhere)


STRANGERS: Mapping[str, Callable[[Path], None]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a link": _link,
    "a link to nothing": lambda path: path.symlink_to("/nowhere/at/all"),
}
"""What is no file, and how it comes to lie at a path."""
