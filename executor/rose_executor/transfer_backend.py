"""ROSE behind vLLM's own interface for weight updates: the backend `rose` of `WeightTransferConfig`.

    llm = LLM(model, weight_transfer_config={"backend": "rose"})
    llm.init_weight_transfer_engine({"init_info": {"address": "10.0.0.7:7070", "token_file": "token", "folder": "w"}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": 7}})     # pulled, verified and staged; nothing has changed yet
    llm.finish_weight_update(weight_version="7")            # changed in place; another label is refused
    llm.reset_prefix_cache()                                # vLLM leaves it to the caller, for every backend

Each worker pulls from a publisher or a relay what leads from the version that it holds to the one it is told, only the
buckets that it needs, into a folder of its own under `folder`, and applies that to its tensors where they lie. An
engine that is given the folder of another one refuses it; where somebody has removed the folder, and the lock with it,
the next update makes and locks it anew. For an engine of several workers the publisher must know
their layouts (`layout_discovery`), to pack for them.

Invariants
- Workers of one engine (tensor and pipeline parallel) are initialised, stage and commit together: where one fails, or
  was brought other weights than another, all take back what they did, go on with what they had, and say so.
- An update that begins anew, the first one always, is taken back like any other, but where the weights in memory were
  none of the published form. Where one worker fails in such a one, or a disk dies while a worker reads from it what it
  has staged, weights are mixed: the error says so, and the engine takes no request until an update has succeeded.
- `finish_weight_update` raises as long as the version is not in force, and may then be called again: it goes on where
  the update stands. Where it cannot, `update_weights` and then it once more bring the engine to a version.
- What was staged is nothing any more once vLLM itself has loaded weights.
- What vLLM calls the weights is the number of the version that all workers hold, and nothing else (`version_label`).
- The weights in memory are compared with what an update begins at, every bucket by its hash, before it is staged, and
  with the version itself where that is in force already. Where others have changed them (vLLM's own reload does), the
  version is fetched anew within the same call, and begins at nothing. Where others give them other memory (an offload
  does), they are compared there; between the stage and the end of an update that is refused, and leaves them mixed.

The first update brings the whole model, for what the engine was loaded from has no version. The model must be a local
folder, whose files say how it is stored. Memory: the staged deltas, at most 64 MiB of them, and one bucket. Disk: what
one update needs, until it is in force, and as much again where its deltas are more; keep `folder` off `/dev/shm`.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from rose.errors import TransferError
from rose.logs import logger
from rose_executor.live_model import LiveModel, is_captured, own_rank
from rose_executor.transfer_info import RoseInitInfo, RoseUpdateInfo, check, fetch
from rose_executor.version_in_memory import VersionInMemory
from rose_executor.worker_agreement import agree
from rose_transfer.codec import WrongBase
from rose_transfer.distribution import Offer
from rose_transfer.live import LiveUpdate, Mixed, RolledBack
from rose_transfer.live.live_weights import OtherForm
from rose_transfer.store import BucketId, Packing
from rose_transfer.store.roles import Role, hold_alone

log = logger("weight transfer backend")
_GO_ON = (
    "call finish_weight_update again; if that cannot go on, update_weights and then finish_weight_update, "
    "or start the engine anew"
)


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

    `received_bytes` came for the last update. `mixed` says why the weights are those of no version, "" if they are not.
    """

    init_info_cls = RoseInitInfo
    update_info_cls = RoseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        rank = own_rank(self.parallel_config)
        replica = self.parallel_config.data_parallel_index
        self._place = f"replica-{replica}-stage-{rank.pp_rank}-rank-{rank.tp_rank}"
        config, captured = self.model_config, is_captured(vllm_config)
        self._live = LiveModel(model, Path(config.model), config.dtype, rank, captured=captured)
        self._from: RoseInitInfo | None = None
        self._folder = Path()
        self._lock = -1
        self._staged: _Staged | None = None
        self._in_force: _InForce | None = None
        self._void = ""
        self.received_bytes = 0
        self.mixed = ""

    @property
    def held(self) -> Offer | None:
        """The version in force, None for what the engine was loaded from, and where nobody knows."""
        return None if self._in_force is None else self._in_force.offer

    def init_transfer_engine(self, init_info: RoseInitInfo) -> None:
        """Nobody is connected to yet. Where this raises, what was said before stays.

        Raises ConfigError if address, token or certificate cannot be used, TransferError if the folder cannot, or if
        another engine uses it.
        """
        folder, lock = self._folder, self._lock
        failed: Exception | None = None
        try:
            check(init_info)
            folder = Path(init_info.folder).resolve() / self._place
            if folder != self._folder:
                lock = hold_alone(folder, Role.ENGINE)
        except Exception as error:  # noqa: BLE001 - raised once the other workers know
            failed = error
        try:
            agree(failed)
        except BaseException:
            if lock != self._lock:
                os.close(lock)
            raise
        if lock != self._lock:
            self._free()
            self._folder, self._lock = folder, lock
        self._from = init_info

    def start_weight_update(self) -> None:
        """Forget what an update that was given up has staged. Raises TransferError if not initialised."""
        if self._from is None:
            raise TransferError("nothing says where weights come from", to_do="call init_weight_transfer_engine first")
        self._drop()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM does it. Raises ValueError or TransferError, at all workers, if the information of one is none."""
        try:
            self.parse_update_info(update_info)
        except (ValueError, TransferError) as error:
            agree(error)
        super().update_weights(update_info)

    def receive_weights(self, update_info: RoseUpdateInfo) -> None:
        """Fetch a version and stage it. The last one that is told before the update is finished counts.

        Raises TransferError on every worker if at one the version is not kept upstream, was damaged or does not fit the
        model, or if two were brought different ones; DeadlineExceeded, Refused, NoRoom.
        """
        self._drop()
        failed, goal = None, None
        try:
            goal = self._stage(update_info).becomes.offer
        except Exception as error:  # noqa: BLE001 - raised once the other workers know
            failed = error
        try:
            agree(failed, goal)
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
            if self._void:
                raise TransferError(self._void, to_do="update_weights again, then finish_weight_update")
            return
        before, self._in_force = self._in_force, None  # nobody knows while it is written
        were_mixed = self.mixed
        failed: Exception | None = None
        try:
            if staged.update is not None:
                staged.update.commit()
            else:
                staged.becomes.memory.weights.check_place()
        except Mixed as error:
            failed = Mixed(error.what, to_do=_GO_ON)
        except Exception as error:  # noqa: BLE001 - raised once the other workers know
            failed = error
        try:
            agree(failed)
        except Exception as error:
            self.mixed = str(error)
            if failed is None and staged.update is not None:
                self._take_back(staged.update, error)
            if failed is None or isinstance(failed, RolledBack):
                self._in_force, self.mixed = before, were_mixed
            raise
        self._in_force, self.mixed = staged.becomes, ""
        self._drop()
        shutil.rmtree(self._incoming, ignore_errors=True)  # the next update needs none of it; what stays costs room
        version = staged.becomes.offer.version
        log.info("new weights are in force", version=version, bytes_received=staged.bytes_received)

    def _take_back(self, update: LiveUpdate, why: Exception) -> None:
        try:
            update.roll_back()
        except Mixed as error:
            self.mixed = f"{why}; {error.what}"
            raise Mixed(self.mixed, to_do=_GO_ON) from why

    def changed_by_others(self) -> None:
        """Hold no version any more: vLLM itself has loaded weights."""
        self._in_force, self.mixed = None, ""
        if self._staged is not None:
            self._drop()
            self._void = "vLLM has loaded weights since the update was staged"

    def shutdown(self) -> None:
        """Let another engine use the folder."""
        self._drop()
        self._free()
        self._from = None

    def _stage(self, wanted: RoseUpdateInfo) -> _Staged:
        self.received_bytes = 0
        self._hold_on()
        try:
            return self._stage_from_held(wanted)
        except (WrongBase, OtherForm) as error:
            if self._in_force is None:
                raise
            log.warning("the weights were changed by others; a version begins anew", why=str(error))
            self._in_force = None
            self._drop()
            return self._stage_from_held(wanted)

    def _stage_from_held(self, wanted: RoseUpdateInfo) -> _Staged:
        assert self._from is not None
        fetched = fetch(self._from, wanted, self.held, self._incoming, self._needs)
        self.received_bytes += fetched.bytes_received
        if not fetched.steps:
            assert self._in_force is not None
            self._in_force.memory.compare()
            self._staged = _Staged(None, self._in_force, fetched.bytes_received)
            return self._staged
        update = self._live.update(fetched.version, fetched.objects_folder, fetched.steps)
        goal = self._live.goal(fetched.objects_folder, fetched.steps)
        becomes = _InForce(Offer(fetched.version, fetched.fingerprint), goal)
        self._staged = _Staged(update, becomes, fetched.bytes_received)
        update.stage()
        return self._staged

    def _needs(self, packed: Packing) -> tuple[BucketId, ...]:
        try:
            return self._live.needs(packed)
        except TransferError:
            return ()  # staging says what does not fit: here it would count as damage, and be fetched again

    @property
    def _incoming(self) -> Path:
        """Beside the lock, which nothing here removes."""
        return self._folder / "incoming"

    def _hold_on(self) -> None:
        """Hold the folder that there is now. Raises TransferError if another engine has taken it meanwhile."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._lock), (self._folder / "lock").stat()):
                return
        lock = hold_alone(self._folder, Role.ENGINE)
        os.close(self._lock)
        self._lock = lock

    def _free(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._folder, self._lock = Path(), -1

    def _drop(self) -> None:
        staged, self._staged, self._void = self._staged, None, ""
        if staged is not None and staged.update is not None:
            staged.update.close()
