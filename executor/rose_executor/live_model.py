"""A worker's model as what versions are applied to: its layout, traced at start, and its tensors.

Invariants
- The layout is traced before the first request, while the folder that the model was loaded from is there and nothing
  else runs in the process.
- What is written to, and compared, is what the model computes with now: its tensors are found anew for each update, and
  once more before its first write. Where they have been given other memory, they are compared there.
- A model that cannot be updated in place serves all the same; what is wrong with it is said when a version is staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rose.errors import RoseError, TransferError
from rose_executor.engine_model import ModelSource
from rose_executor.engine_rank import EngineRank
from rose_executor.layout_trace import trace_layout
from rose_executor.module_tensors import ModuleTensors
from rose_executor.version_in_memory import VersionInMemory
from rose_transfer.layout.checkpoint import checkpoint_parameters
from rose_transfer.layout.layout import Layout
from rose_transfer.live import LiveUpdate, LiveWeights
from rose_transfer.live.held import held_buckets
from rose_transfer.store import BucketId, Objects, Packing, Step, manifest, packing


class LiveModel:
    """`model` as loaded from `model_dir` in `dtype` by the worker at `rank`; for `captured` see `ModuleTensors`."""

    def __init__(
        self, model: torch.nn.Module, model_dir: Path, dtype: torch.dtype, rank: EngineRank, *, captured: bool = False
    ) -> None:
        self._model = model
        self._tensors = ModuleTensors(model, captured=captured)
        self._layout: Layout | None = None
        self._trouble = ""
        self._packed_as = ""
        self._weights: LiveWeights | None = None
        try:
            source = ModelSource(model_dir, checkpoint_parameters(model_dir), dtype)
            self._layout = trace_layout(str(rank), source, rank)
        except RoseError as error:
            self._trouble = str(error)

    @property
    def layout(self) -> Layout:
        """How the model lies in memory. Raises TransferError if it cannot be updated in place."""
        if self._layout is None:
            raise TransferError(
                f"this model cannot be updated in place: {self._trouble}",
                to_do="start the engine anew from each version",
            )
        return self._layout

    def update(self, version: int, objects: Path, way: Sequence[tuple[str, bool]]) -> LiveUpdate:
        """The way to `version` as (key of a manifest in the folder `objects`, backwards?), first step first.

        Raises TransferError if this model cannot be updated in place, or the way is not one to that version of it.
        """
        layout = self.layout
        refuse_packed(self._model)
        held = Objects(objects)
        steps = [_step(held, *step) for step in way]
        if not steps or _goal(steps[-1]) != version:
            raise TransferError(
                f"a way to version {_goal(steps[-1]) if steps else 'nothing'}", expected=f"version {version}"
            )
        keys = {step.manifest.packing for step in steps}
        if len(keys) > 1:
            raise TransferError("the steps of a way pack the model in different ways", to_do="begin anew")
        return LiveUpdate(self._weights_packed(layout, held, keys.pop()), steps, held.read, objects)

    def goal(self, objects: Path, way: Sequence[tuple[str, bool]]) -> VersionInMemory:
        """What memory holds once `way` was gone. Raises TransferError as `update` does."""
        held = Objects(objects)
        last = _step(held, *way[-1])
        weights = self._weights_packed(self.layout, held, last.manifest.packing)
        entries = last.manifest.buckets
        return VersionInMemory(
            weights,
            {place: entries[place].before if last.backwards else entries[place].after for place in weights.places},
        )

    def needs(self, packed: Packing) -> tuple[BucketId, ...]:
        """The buckets of a packing that this rank holds. Raises TransferError if that does not fit this model."""
        return tuple(held.bucket.bucket_id for held in held_buckets(packed, self.layout))

    def _weights_packed(self, layout: Layout, held: Objects, key: str) -> LiveWeights:
        """The model's memory, where it lies now, by the packing in an object."""
        if self._weights is not None and self._packed_as == key:
            self._weights = self._weights.found_anew()
        else:
            self._weights = LiveWeights(layout, packing.from_bytes(held.read(key)), self._tensors)
            self._packed_as = key
        return self._weights


def own_rank(parallel_config: Any) -> EngineRank:
    """The place of this worker process in its engine."""
    from vllm.distributed import parallel_state

    tensor, stage = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return EngineRank(
        tensor.world_size,
        tensor.rank_in_group,
        stage.world_size,
        stage.rank_in_group,
        bool(parallel_config.enable_expert_parallel),
    )


def is_captured(vllm_config: Any) -> bool:
    """Whether this engine captures graphs of its computation."""
    from vllm.config import CUDAGraphMode

    return bool(vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE)


def refuse_packed(model: torch.nn.Module) -> None:
    """Raises TransferError if any weight has an opaque copy that an update in place would not reach."""
    for name, module in model.named_modules():
        product = getattr(module, "cpu_linear", torch.nn.functional.linear)
        if product is not torch.nn.functional.linear:
            raise TransferError(
                f"the weight of {name} is packed and cannot be replaced in place",
                expected="an engine started with unpacked weights",
            )


def _step(held: Objects, key: str, backwards: bool) -> Step:
    return Step(manifest.from_bytes(held.read(key)), backwards)


def _goal(step: Step) -> int | None:
    return step.manifest.base if step.backwards else step.manifest.version
