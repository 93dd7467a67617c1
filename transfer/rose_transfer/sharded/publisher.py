"""A version from a trainer whose ranks each hold a part of the model (FSDP2, tensor parallel, pipeline stages).

Every bucket has a rank that owns it. To publish, all ranks send the owners what they hold of each bucket; an owner
knows the bits of the version before and makes the delta; the rank with the store writes the deltas as one version.

Invariants
- What is stored is, byte for byte, what `Store.publish` makes of the whole state dict in the same packing.
- A version appears in the store whole or not at all, whichever rank fails or dies; the versions before stay, but
  for the oldest ones where there is no room otherwise, as with a WeightPublisher.
- All ranks return the same manifest, or all raise. A rank that fails by itself goes on sending as planned until it can
  say so; when one has died, the others raise within the time that one publish has.
- No rank holds more of the model than its share, a bucket that it receives and two buckets' worth that it sends; its
  share twice while a version is written whole.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
import torch.distributed as dist

from rose.errors import TransferError
from rose.logs import logger
from rose.version_number import version_number
from rose.waits import WaitBoard
from rose_transfer.codec.streams import Mode
from rose_transfer.layout.export import Export
from rose_transfer.sharded.agreement import Call, JointTrouble, agree
from rose_transfer.sharded.delivery import WRITER, deliver, restore, tell_entries
from rose_transfer.sharded.holding import Holding
from rose_transfer.sharded.making import Team, make, make_room
from rose_transfer.sharded.owned import OwnedBuckets
from rose_transfer.sharded.ranks import Ranks
from rose_transfer.sharded.routes import Routes, make_routes, plan_own
from rose_transfer.store.manifest import Manifest
from rose_transfer.store.objects import object_key
from rose_transfer.store.packing import Packing
from rose_transfer.store.store import Store, check_weights

log = logger("sharded publisher")
PUBLISH_TIMEOUT_S = 600.0


class ShardedPublisher:
    """One of these on each rank of `group`, a process group that nothing else uses; rank 0 of it has the `store`.

    `packing` says which parameters lie where, the same on every rank: `pack_whole(checkpoint_parameters(folder))`, or
    `pack_for` the layouts of all ranks that fetch, who then fetch only what they hold.
    `export` says what becomes of the trainer's tensors; without one they are named and shaped as published.
    `compress` writes deltas in zstd. Give the store the same value.

    Raises ValueError if this process is not in the group, or if another rank than 0 has a store, or 0 has none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        packing: Packing,
        export: Export | None = None,
        *,
        store: Store | None = None,
        compress: bool = False,
        waits: WaitBoard | None = None,
    ) -> None:
        self._ranks = Ranks(group, waits or WaitBoard())
        if (store is not None) != (self._ranks.rank == WRITER):
            raise ValueError(f"rank {WRITER}, and no other, has the store; this is rank {self._ranks.rank}")
        self._store = store
        self._packing = packing
        self._packing_key = object_key(packing.to_bytes())
        self._compress = compress
        self._holding = Holding(
            f"rank {self._ranks.rank}", packing.parameters, export or Export.under_own_names(packing.parameters)
        )
        self._planned: tuple[str, ...] = ()
        self._routes = Routes((), {}, {}, ())
        self._owned = OwnedBuckets()
        self._publishing = threading.Lock()

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> Manifest:
        """Store what `tensors` hold on all ranks together as `version`, in steps from the newest version in the store.

        `tensors` are this rank's parameters under the trainer's names, DTensors or whole, and must not change until
        this returns. Every rank calls it, and it blocks: call it from a thread where an event loop must go on. Where
        the store has no version yet, or packed in another way or damaged, everything is written.

        Raises TransferError on every rank if one cannot publish: the number is not a new highest one below 2^63, the
        tensors are not those of the packing or there are none, the disk is full, or ranks mean different versions.
        Raises LostRank if one has died or not come here after `timeout_s`; a new group and new publishers are needed
        then.
        """
        if not self._publishing.acquire(blocking=False):
            raise TransferError("another version is being published", expected="one after the other")
        try:
            with self._ranks.within(timeout_s):
                return self._publish(version, tensors)
        finally:
            self._holding.tensors = {}
            self._publishing.release()

    def _publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        with self._ranks.telling_trouble():
            version = version_number(version)
            call = self._call(version, tensors)
        calls = [Call.from_bytes(data) for data in self._ranks.tell(call.to_bytes())]
        agreed = agree(calls, WRITER, self._planned)
        if agreed.plan:
            self._plan(tuple(one.layout for one in calls))
        team = Team(self._ranks, self._packing, self._routes)
        base = agreed.base
        if base is None:
            self._owned.forget()
        elif agreed.restore and not restore(team, base, self._owned, self._store):
            base = None
        with self._ranks.telling_trouble():
            rooms = make_room(team)
        self._ranks.tell(b"")
        with self._ranks.telling_trouble():
            made = make(team, rooms, self._holding.tensors, self._owned, whole=base is None, compress=self._compress)
        mode: Mode = "overwrite" if base is None else "steps"
        manifest = Manifest(version, base, mode, self._packing_key, tell_entries(team, made))
        deliver(team, manifest, made, self._store)
        self._owned.fingerprint = manifest.fingerprint
        return manifest

    def _call(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Call:
        check_weights(version, self._packing)
        self._holding.look(tensors)
        base = None if self._store is None else self._base(self._store, version)
        return Call(
            version=version,
            packing=self._packing_key,
            compress=self._compress,
            layout=self._holding.fingerprint,
            held=self._owned.fingerprint,
            base=base,
            base_fingerprint=None if self._store is None or base is None else self._store.fingerprint(base),
        )

    def _base(self, store: Store, version: int) -> int | None:
        """The version to make steps from, if there is one."""
        newest = store.newest
        if newest is None:
            return None
        if version <= newest:
            raise JointTrouble(f"version {version} comes after {newest}", expected="numbers that rise")
        try:
            same = store.packing_key(newest) == self._packing_key
        except TransferError as error:
            log.warning("the base cannot be had, and the version is written whole", base=newest, why=str(error))
            return None
        if not same:
            log.warning("the model is packed in another way than before, and written whole", base=newest)
        return newest if same else None

    def _plan(self, layouts: tuple[str, ...]) -> None:
        """Plan anew who owns and sends what; `layouts` are the fingerprints of what the ranks hold."""
        told = self._ranks.tell(self._holding.to_bytes())
        with self._ranks.telling_trouble():
            own = plan_own(self._packing, [self._holding.layout_of(data) for data in told], self._ranks.rank)
            words = own.to_bytes(self._packing)
        self._routes = make_routes(self._packing, own, self._ranks.rank, self._ranks.tell(words))
        self._planned = layouts
