"""What a transport serves of a store: its objects as they are, and ways, made when they are asked for.

Invariants
- A way is made once under its key, and what was answered is kept for a while, so that a fetch that was cut goes on.
- Making one (deltas may have to be merged first) holds up neither the loop nor the readers of other objects.
- Objects that a way named may be gone a moment later: versions are retired while they are fetched. Who is told so
  asks again. What is open by then stays readable.
- A checked way leads over objects that were all read just now. What turns out damaged is left out of the store's
  ways for good.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from rose.errors import TransferError
from rose_transfer.codec import MalformedDelta
from rose_transfer.distribution.way import Way, WayAsk, ask_of
from rose_transfer.store import LostObject, Manifest, Step, Store
from rose_transfer.transport.interface import ReadableObject

_WAYS_KEPT = 256
_MAKERS = 4


class StoreSource:
    """The objects of `store`, and ways between its versions, until `close`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._makers = ThreadPoolExecutor(_MAKERS, thread_name_prefix="rose-way")
        # Changed in the server's loop only; its readers look keys up.
        self._ways: OrderedDict[str, bytes] = OrderedDict()

    async def prepare(self, key: str) -> None:
        """Make the way that `key` asks for, if it does and its goal is kept. Raises TransferError if that is lost."""
        ask = ask_of(key)
        if ask is None or key in self._ways:
            return
        way = await asyncio.get_running_loop().run_in_executor(self._makers, self._way, ask)
        if way is not None:
            self._ways[key] = way.to_bytes()
            while len(self._ways) > _WAYS_KEPT:
                self._ways.popitem(last=False)

    def has(self, key: str) -> bool:
        return key in self._ways or self._store.objects.has(key)

    def open(self, key: str) -> ReadableObject:
        """Raises LostObject if there is none, or TransferError."""
        data = self._ways.get(key)
        return self._store.objects.open(key) if data is None else _Text(data)

    def close(self) -> None:
        """Make no ways any more."""
        self._makers.shutdown(wait=False, cancel_futures=True)

    def _way(self, ask: WayAsk) -> Way | None:
        """In a thread. None if the goal is not kept, or no longer."""
        store = self._store
        start = ask.start
        if start is not None and not store.holds(start, ask.start_fingerprint or ""):
            start = None
        try:
            fingerprint = store.fingerprint(ask.goal)
            steps = self._sound_steps(start, ask.goal) if ask.checked else store.delta(start, ask.goal)
        except TransferError:
            if ask.goal in store.versions():
                raise
            return None
        named = tuple((step.manifest.key, step.backwards) for step in steps)
        return Way(ask.goal, fingerprint, start, named)

    def _sound_steps(self, start: int | None, goal: int) -> tuple[Step, ...]:
        while True:
            steps = self._store.delta(start, goal)
            for step in steps:
                try:
                    self._read_all(step.manifest)
                except (LostObject, MalformedDelta) as error:
                    self._store.leave_out(step.manifest, str(error))
                    break
            else:
                return steps

    def _read_all(self, manifest: Manifest) -> None:
        """Raises LostObject or MalformedDelta for what is damaged, having mended what is in memory as well."""
        objects = self._store.objects
        objects.put(manifest.to_bytes())
        try:
            objects.read(manifest.packing)
        except LostObject:
            objects.put(self._store.read_packing(manifest.packing).to_bytes())
        for entry in manifest.buckets:
            self._store.load(manifest, entry)


class _Text:
    """A made object, readable in parts."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def read_at(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def close(self) -> None:
        """Nothing is open."""
