"""Proof of a traced layout on real memory: load weights that say which element they are, and look.

Every element of the checkpoint gets a number, from 1, and is loaded digit by digit (base 256: exact in every
float dtype of eight bits of mantissa or more), one load per digit, into parameters filled with -1. Afterwards
each element of each parameter is a number, 0 where the loader itself wrote padding, or -1 where it wrote
nothing: all of which the layout must have said. For small twins of a model: it takes its memory, several times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from rose.errors import TransferError
from rose_executor.engine_model import ModelSource, as_rank, build
from rose_executor.engine_rank import EngineRank
from rose_transfer.layout.layout import Layout, Parameter

Numbers = NDArray[np.int64]
BASE = 256
PADDING, UNWRITTEN = 0, -1


def certify(layout: Layout, source: ModelSource, rank: EngineRank) -> int:
    """Compare every element of every local tensor; returns how many.

    Raises TransferError that names tensor and holder at the first element that is not where the layout says.
    """
    expected = _expected(layout)
    found = _loaded(layout, source, rank, processed=False)
    for name, numbers in expected.items():
        if name not in found or found[name].shape != numbers.shape:
            raise TransferError(
                f"{layout.holder}: {name} has shape {found[name].shape if name in found else 'none'}",
                expected=f"{numbers.shape}, as traced",
            )
        wrong = np.argwhere(found[name] != numbers)
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            raise TransferError(
                f"{layout.holder}: {name}{list(at)} holds {_words(layout.parameters, int(found[name][at]))}",
                expected=f"{_words(layout.parameters, int(numbers[at]))}, as traced",
                to_do="update this model by whole versions",
            )
    return sum(numbers.size for numbers in expected.values())


def relaid(layout: Layout, source: ModelSource, rank: EngineRank) -> tuple[str, ...]:
    """The local tensors that vLLM packs, pads or permutes after loading: a live engine's are not as the layout says.

    Depends on what this process makes of weights (a packed or an unpacked CPU build). It sees memory, not what is
    computed with: whether a kernel works on a copy of its own only a comparison of outputs can tell.
    """
    expected = _expected(layout)
    found = _loaded(layout, source, rank, processed=True)
    return tuple(
        name
        for name, numbers in expected.items()
        if name not in found or found[name].shape != numbers.shape or (found[name] != numbers).any()
    )


def _expected(layout: Layout) -> dict[str, Numbers]:
    """Local tensors as the layout says they are."""
    numbers = _numbered(layout.parameters)
    expected = {name: np.full(tensor.shape, UNWRITTEN) for name, tensor in layout.tensors.items()}
    for pad in layout.pads:
        expected[pad.tensor][_slices(pad.box.starts, pad.box.ends)] = PADDING
    for piece in layout.pieces:
        memory = expected[piece.tensor].reshape(-1)
        strides = tuple(stride * memory.itemsize for stride in piece.strides)
        inside = _slices(piece.box.starts, piece.box.ends)
        as_strided(memory[piece.offset :], piece.box.sizes, strides)[...] = numbers[piece.parameter][inside]
    return expected


def _loaded(layout: Layout, source: ModelSource, rank: EngineRank, *, processed: bool) -> dict[str, Numbers]:
    """Local tensors as the loader, and vLLM's work on them afterwards if `processed`, leaves them."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    numbers = _numbered(layout.parameters)
    elements = sum(math.prod(parameter.shape) for parameter in layout.parameters.values())
    found: dict[str, Numbers] = {}
    weight = 1
    while weight <= elements:
        with as_rank(source, rank) as config, torch.no_grad():
            model = build(config, with_memory=True)
            for parameter in model.parameters():
                parameter.fill_(UNWRITTEN)
            digits = ((name, _digit(layout.parameters[name], value, weight)) for name, value in numbers.items())
            model.load_weights(digits)  # type: ignore[operator]
            if processed:
                process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            _accumulate(found, model, weight)
        weight *= BASE
    return found


def _accumulate(found: dict[str, Numbers], model: torch.nn.Module, weight: int) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.dtype.is_floating_point:
            continue
        digit = tensor.detach().double().nan_to_num(UNWRITTEN).numpy().round().astype(np.int64)
        before = found.get(name)
        if before is None:
            found[name] = digit
        elif before.shape == digit.shape:
            # An unwritten element is -1 in every digit, and stays -1.
            found[name] = np.where(digit == UNWRITTEN, UNWRITTEN, before + weight * digit)


def _numbered(parameters: Mapping[str, Parameter]) -> dict[str, Numbers]:
    numbers: dict[str, Numbers] = {}
    first = 1
    for name, parameter in parameters.items():
        count = math.prod(parameter.shape)
        numbers[name] = np.arange(first, first + count).reshape(parameter.shape)
        first += count
    return numbers


def _digit(parameter: Parameter, numbers: Numbers, weight: int) -> torch.Tensor:
    return torch.from_numpy(numbers // weight % BASE).to(getattr(torch, parameter.dtype))


def _slices(starts: tuple[int, ...], ends: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))


def _words(parameters: Mapping[str, Parameter], number: int) -> str:
    """Which element a number stands for."""
    if number == UNWRITTEN:
        return "nothing"
    if number == PADDING:
        return "padding"
    first = 1
    for name, parameter in parameters.items():
        count = math.prod(parameter.shape)
        if first <= number < first + count:
            return f"{name}{[int(i) for i in np.unravel_index(number - first, parameter.shape)]}"
        first += count
    return f"the number {number}"
