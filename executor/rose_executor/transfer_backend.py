"""ROSE behind vLLM's own interface for weight updates: the backend `rose` of `WeightTransferConfig`.

    llm = LLM(model, weight_transfer_config={"backend": "rose"})
    llm.init_weight_transfer_engine({"init_info": {"address": "10.0.0.7:7070", "token_file": "token", "folder": "w"}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": 7}})     # pulled, verified and staged; nothing has changed yet
    llm.finish_weight_update(weight_version="7")            # changed in place
    llm.reset_prefix_cache()                                # vLLM leaves it to the caller, for every backend

Each worker pulls from a publisher or a relay what leads from the version that it holds to the one it is told, only the
buckets that it needs, into a folder of its own under `folder`, and applies that to its tensors where they lie. An
engine that is given the folder of another one refuses it. For an engine of several workers the publisher must know
their layouts (`layout_discovery`), to pack for them.

Invariants
- Workers of one engine (tensor and pipeline parallel) stage and commit together: where one fails all take back what
  they did, go on with the weights they had, and say so.
- An update that begins anew, the first one always, is taken back like any other, but where the weights in memory were
  none of the published form. Where one worker fails in such a one, the error says that the weights are mixed: the
  engine must not generate before `finish_weight_update` has succeeded.
- `finish_weight_update` raises as long as the version is not in force, and may then be called again.
- The weights in memory are compared with what an update begins at, every bucket by its hash, before it is staged, and
  with the version itself where that is in force already. Where others have changed them (vLLM's own reload does), the
  version is fetched anew within the same call, and begins at nothing.

The first update brings the whole model, for what the engine was loaded from has no version. The model must be a local
folder, whose files say how it is stored. Memory: the staged deltas, at most 64 MiB of them, and one bucket. Disk: what
one update needs, until it is in force, and as much again where its deltas are more; keep `folder` off `/dev/shm`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.errors import TransferError
from rose.logs import logger
from rose.waits import WaitBoard
from rose_executor.live_model import LiveModel, own_rank
from rose_executor.version_in_memory import VersionInMemory
from rose_transfer.codec import WrongBase
from rose_transfer.distribution import Fetched, Offer, Receiver
from rose_transfer.live import LiveUpdate, RolledBack
from rose_transfer.live.live_weights import OtherForm
from rose_transfer.store import BucketId, Packing
from rose_transfer.store.files import disk_trouble, hold_alone
from rose_transfer.transport.access import client_tls, host_and_port, read_token
from rose_transfer.transport.tcp import TcpClient

T = TypeVar("T")
log = logger("weight transfer backend")


@dataclass
class RoseInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where weights come from, and where they are put.

    `address` (HOST:PORT) is that of a publisher or a relay, `token_file` has its token; with `ca_file` (PEM) it is
    spoken to by TLS and trusted by that authority alone. `folder` is for this engine alone, as long as it runs.
    """

    address: str
    token_file: str
    folder: str
    ca_file: str | None = None


@dataclass
class RoseUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to bring the engine to, and how long fetching it may take."""

    version: int
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class _InForce:
    """What the weights are, as far as this backend is the only one to change them."""

    offer: Offer
    memory: VersionInMemory


@dataclass(frozen=True, slots=True)
class _Staged:
    """`update` is None where the version is in force already."""

    update: LiveUpdate | None
    becomes: _InForce
    bytes_received: int


class RoseWeightTransferEngine(WeightTransferEngine[RoseInitInfo, RoseUpdateInfo]):  # type: ignore[misc]
    """One worker's side.

    `received_bytes` came for the last update.
    """

    init_info_cls = RoseInitInfo
    update_info_cls = RoseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        rank = own_rank(self.parallel_config)
        replica = self.parallel_config.data_parallel_index
        self._place = f"replica-{replica}-stage-{rank.pp_rank}-rank-{rank.tp_rank}"
        self._live = LiveModel(model, Path(self.model_config.model), self.model_config.dtype, rank)
        self._from: RoseInitInfo | None = None
        self._folder = Path()
        self._lock = -1
        self._staged: _Staged | None = None
        self._in_force: _InForce | None = None
        self.received_bytes = 0

    @property
    def held(self) -> Offer | None:
        """The version in force, None for what the engine was loaded from, and where nobody knows."""
        return None if self._in_force is None else self._in_force.offer

    def init_transfer_engine(self, init_info: RoseInitInfo) -> None:
        """Nobody is connected to yet. Where this raises, what was said before stays.

        Raises ConfigError if address, token or certificate cannot be used, TransferError if the folder cannot, or if
        another engine uses it.
        """
        host_and_port(init_info.address)
        read_token(Path(init_info.token_file))
        if init_info.ca_file is not None:
            client_tls(Path(init_info.ca_file))
        folder = Path(init_info.folder).resolve() / self._place
        if folder != self._folder:
            with disk_trouble(f"{folder} cannot be made"):
                folder.mkdir(parents=True, exist_ok=True)
            lock = hold_alone(folder, "has its weights come to")
            self._free()
            self._folder, self._lock = folder, lock
        self._from = init_info

    def start_weight_update(self) -> None:
        """Forget what an update that was given up has staged. Raises TransferError if not initialised."""
        if self._from is None:
            raise TransferError("nothing says where weights come from", to_do="call init_weight_transfer_engine first")
        self._drop()

    def receive_weights(self, update_info: RoseUpdateInfo) -> None:
        """Fetch a version and stage it. The last one that is told before the update is finished counts.

        Raises TransferError on every worker if at one the version is not kept upstream, was damaged, does not fit the
        model, or the weights in memory are not those of the version in force; DeadlineExceeded, Refused, NoRoom.
        """
        self._drop()
        failed: Exception | None = None
        try:
            self._stage(update_info)
        except Exception as error:  # noqa: BLE001 - raised once the other workers know
            failed = error
        try:
            _agree(failed)
        except BaseException:
            self._drop()
            raise

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Change the weights.

        Raises TransferError that says which: RolledBack where they are the old ones again, or that they are mixed.
        """
        staged = self._staged
        if staged is None:
            return
        before, self._in_force = self._in_force, None  # nobody knows while it is written
        failed: Exception | None = None
        try:
            if staged.update is not None:
                staged.update.commit()
        except Exception as error:  # noqa: BLE001 - raised once the other workers know
            failed = error
        try:
            _agree(failed)
        except TransferError as error:
            if failed is None and staged.update is not None:
                self._take_back(staged.update, error)
            if failed is None or isinstance(failed, RolledBack):
                self._in_force = before
            raise
        self._in_force = staged.becomes
        self._drop()
        shutil.rmtree(self._incoming, ignore_errors=True)  # the next update needs none of it; what stays costs room
        version = staged.becomes.offer.version
        log.info("new weights are in force", version=version, bytes_received=staged.bytes_received)

    def _take_back(self, update: LiveUpdate, why: TransferError) -> None:
        try:
            update.roll_back()
        except TransferError as error:
            raise TransferError(
                f"the weights of this engine's workers are mixed: {why.what}; {error.what}",
                to_do="do not generate; finish the update again, or start the engine anew",
            ) from why

    def shutdown(self) -> None:
        """Let another engine use the folder."""
        self._drop()
        self._free()
        self._from = None

    def _stage(self, wanted: RoseUpdateInfo) -> None:
        self.received_bytes = 0
        try:
            self._stage_from_held(wanted)
        except (WrongBase, OtherForm) as error:
            if self._in_force is None:
                raise
            log.warning("the weights were changed by others; a version begins anew", why=str(error))
            self._in_force = None
            self._drop()
            self._stage_from_held(wanted)

    def _stage_from_held(self, wanted: RoseUpdateInfo) -> None:
        fetched = _in_a_thread(self._fetch(wanted))
        self.received_bytes += fetched.bytes_received
        if not fetched.steps:
            assert self._in_force is not None
            self._in_force.memory.compare()
            self._staged = _Staged(None, self._in_force, fetched.bytes_received)
            return
        update = self._live.update(fetched.version, fetched.objects_folder, fetched.steps)
        goal = self._live.goal(fetched.objects_folder, fetched.steps)
        becomes = _InForce(Offer(fetched.version, fetched.fingerprint), goal)
        self._staged = _Staged(update, becomes, fetched.bytes_received)
        update.stage()

    async def _fetch(self, wanted: RoseUpdateInfo) -> Fetched:
        assert self._from is not None
        waits = WaitBoard()
        trusted = None if self._from.ca_file is None else client_tls(Path(self._from.ca_file))
        token = read_token(Path(self._from.token_file))
        client = TcpClient(*host_and_port(self._from.address), token=token, waits=waits, tls=trusted)
        try:
            receiver = Receiver(client, self._incoming, waits=waits, wanted=self._needs)
            held = self.held
            number, bits = (None, None) if held is None else (held.version, held.fingerprint)
            try:
                return await receiver.fetch(number, bits, wanted.version, deadline_s=wanted.timeout_s)
            finally:
                receiver.close()
        finally:
            await client.close()

    def _needs(self, packed: Packing) -> tuple[BucketId, ...]:
        try:
            return self._live.needs(packed)
        except TransferError:
            return ()  # staging says what does not fit: here it would count as damage, and be fetched again

    @property
    def _incoming(self) -> Path:
        """Beside the lock, which nothing may remove."""
        return self._folder / "incoming"

    def _free(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._folder, self._lock = Path(), -1

    def _drop(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and staged.update is not None:
            staged.update.close()


def _agree(failed: Exception | None) -> None:
    """Raise `failed`, or that another worker of this engine has failed. Every worker must call it.

    It waits for the slowest one, at most as long as vLLM's process groups allow: a worker that died ends the engine.
    """
    words = "" if failed is None else str(failed) or type(failed).__name__
    for group in (parallel_state.get_tp_group(), parallel_state.get_pp_group()):
        if group.world_size > 1:
            told: list[str] = [""] * group.world_size
            dist.all_gather_object(told, words, group=group.cpu_group)
            words = next(filter(None, told), "")
    if failed is not None:
        raise failed
    if words:
        raise TransferError(f"another worker failed: {words}")


def _in_a_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in an event loop of its own: the one of this thread, if there is one, is vLLM's."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()
