"""The layout of any rank of an engine, discovered by running vLLM's own loader on a model without memory.

No name is known here: fused projections, experts, replicated key-value heads, tied or padded vocabularies and
pipeline stages are what the loader makes of them. Nothing is declared, so nothing can be declared wrongly;
`layout_certificate` proves the result on real memory.

What is traced is the model before vLLM's post-processing: see `layout_certificate.relaid`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from rose.errors import TransferError
from rose_executor import vllm_contract, vllm_reliances
from rose_executor.copy_recorder import Copied, CopyRecorder, Zeroed, storage_id
from rose_executor.engine_model import ModelSource, as_rank, build
from rose_executor.engine_rank import EngineRank
from rose_transfer.layout.box import Box, subtract_all
from rose_transfer.layout.dtypes import dtype_name
from rose_transfer.layout.layout import Layout, LocalTensor, Pad, Parameter, Piece, check_destination
from rose_transfer.layout.strided import box_copies, view_boxes


def trace_layout(holder: str, source: ModelSource, rank: EngineRank) -> Layout:
    """Which slices of the tensors of the checkpoint `rank` would hold, and where.

    Takes seconds for models of tens of thousands of tensors, and no memory for weights. Raises TransferError
    that names the tensor and `holder` if the loader fails, does more than move slices, or leaves an element of
    a parameter unwritten or written twice, EngineError if this vLLM is not one that the tracing knows.
    """
    vllm_contract.check(vllm_reliances.TRACING)
    with ExitStack() as stack:
        try:
            config = stack.enter_context(as_rank(source, rank))
            model = build(config, with_memory=False)
        except Exception as error:
            raise TransferError(
                f"{holder}: vLLM cannot build {source.model_dir} for {rank}: {type(error).__name__}: {error}",
                expected="a model and a place in it that an engine could have",
            ) from error
        targets = _targets(holder, model)
        feed = _Feed(holder, source.parameters)
        recorder = CopyRecorder(holder, feed.tensors, targets)
        with recorder:
            feed.into(model)
    return _layout(holder, source.parameters, model, targets, recorder)


def _layout(
    holder: str,
    parameters: Mapping[str, Parameter],
    model: torch.nn.Module,
    targets: Mapping[str, torch.Tensor],
    recorder: CopyRecorder,
) -> Layout:
    """Every parameter, and those buffers that were written."""
    written = {event.target for event in recorder.events}
    kept = {name for name, _ in model.named_parameters()} | written
    tensors = {
        name: LocalTensor(tuple(tensor.shape), dtype_name(tensor.dtype))
        for name, tensor in targets.items()
        if name in kept
    }
    layout = _Assembly(holder, parameters, tensors).assemble(recorder.events)
    check_destination(layout)
    return layout


def _targets(holder: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and the buffers that share no memory: a checkpoint may fill those too."""
    targets: dict[str, torch.Tensor] = {}
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        owner = owners.setdefault(storage_id(parameter), name)
        if owner != name or not parameter.is_contiguous() or parameter.storage_offset() != 0:
            raise TransferError(f"{holder}: {name} is a view of other memory", expected="row-major parameters")
        targets[name] = parameter.detach()
    for name, buffer in model.named_buffers():
        # Buffers with memory are tables that the model made itself, which its loader may read.
        if buffer.is_meta and owners.setdefault(storage_id(buffer), name) == name and buffer.is_contiguous():
            targets[name] = buffer
    return targets


class _Feed:
    """Hands the checkpoint's tensors to a loader and remembers which one it is at."""

    def __init__(self, holder: str, parameters: Mapping[str, Parameter]) -> None:
        self._holder = holder
        self._at = "the first tensor"
        self.tensors = {
            name: torch.empty(parameter.shape, dtype=getattr(torch, parameter.dtype), device="meta")
            for name, parameter in parameters.items()
        }

    def into(self, model: Any) -> None:
        try:
            model.load_weights(iter(self))
        except TransferError as error:
            raise TransferError(f"{error.what} (at {self._at})", expected=error.expected, to_do=error.to_do) from error
        except Exception as error:
            raise TransferError(
                f"{self._holder}: {type(model).__name__} cannot load {self._at}: {type(error).__name__}: {error}",
                expected="the tensors of a checkpoint of this model",
            ) from error

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            self._at = name
            yield name, tensor


class _Assembly:
    """Turns what a loader did into pieces and padding."""

    def __init__(self, holder: str, parameters: Mapping[str, Parameter], tensors: Mapping[str, LocalTensor]) -> None:
        self._holder = holder
        self._parameters = parameters
        self._tensors = tensors
        self._pieces: list[Piece] = []
        self._written: dict[str, list[Box]] = {}
        self._zeroed: dict[str, list[Box]] = {}

    def assemble(self, events: list[Copied | Zeroed]) -> Layout:
        for event in events:
            if isinstance(event, Copied):
                self._copied(event)
            else:
                self._fill(event)
        pads = [
            Pad(name, box)
            for name, zeroed in self._zeroed.items()
            for box in subtract_all(zeroed, self._written.get(name, []))
        ]
        return Layout(self._holder, dict(self._parameters), dict(self._tensors), tuple(self._pieces), tuple(pads))

    def _copied(self, event: Copied) -> None:
        shape, local_shape = self._parameters[event.source].shape, self._tensors[event.target].shape
        try:
            copies = box_copies(shape, event.source_view, local_shape, event.target_view)
        except TransferError as error:
            raise TransferError(
                f"{self._holder}: {event.source} into {event.target}: {error.what}", expected=error.expected
            ) from error
        for copy in copies:
            self._pieces.append(Piece(event.source, copy.source, event.target, copy.offset, copy.strides))
            self._written.setdefault(event.target, []).append(copy.destination)

    def _fill(self, event: Zeroed) -> None:
        boxes = view_boxes(self._tensors[event.target].shape, event.view)
        for written in self._written.get(event.target, []):
            if any(box.intersect(written) for box in boxes):
                raise TransferError(
                    f"{self._holder}: {event.target}{written} is filled with zeros after it was loaded",
                    expected="padding beside the weights",
                )
        zeroed = self._zeroed.setdefault(event.target, [])
        zeroed += subtract_all(boxes, zeroed)
