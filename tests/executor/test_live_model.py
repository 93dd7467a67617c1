"""A worker's model whose parameters are given other memory is updated where it computes, or not at all."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.errors import TransferError
from rose_executor import live_model
from rose_executor.engine_rank import EngineRank
from rose_executor.live_model import LiveModel
from rose_executor.module_tensors import ModuleTensors
from rose_executor.weight_worker import WeightWorker
from rose_transfer.codec import WrongBase
from rose_transfer.layout.box import Box
from rose_transfer.layout.layout import Layout, LocalTensor, Parameter, Piece
from rose_transfer.live import LiveUpdate
from rose_transfer.live.live_weights import Moved
from rose_transfer.store import Store
from rose_transfer.store.buckets import pack
from rose_transfer.store.packing import pack_whole

LONG_S = 30
SHAPE = (300, 100)
NAMES = ("first.weight", "second.weight")
PARAMETERS = {name: Parameter(SHAPE, "float32") for name in NAMES}
PACKING = pack_whole(PARAMETERS, bucket_bytes=50_000)
LAYOUT = Layout(
    "rank 0",
    PARAMETERS,
    {name: LocalTensor(SHAPE, "float32") for name in NAMES},
    tuple(Piece(name, Box.whole(SHAPE), name, 0, (SHAPE[1], 1)) for name in NAMES),
)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False) for _ in NAMES)
        self.requires_grad_(False)


class Versions:
    """Of the model: 1 to 3, each in steps from the one before."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        generator = torch.Generator().manual_seed(1)
        weights = {name: torch.randn(SHAPE, generator=generator) for name in NAMES}
        for version in (1, 2, 3):
            weights = {name: value.clone() for name, value in weights.items()}
            for value in weights.values():
                value[version] += 1
            self.store.publish(version, PACKING, pack(PACKING, weights), base=self.store.newest)
            self.states[version] = weights

    @property
    def objects(self) -> Path:
        return self.store.folder / "objects"

    def way(self, start: int | None, goal: int) -> list[tuple[str, bool]]:
        return [(step.manifest.key, step.backwards) for step in self.store.steps(start, goal)]

    def staged(self, live: LiveModel, start: int | None, goal: int) -> LiveUpdate:
        update = live.update(goal, self.objects, self.way(start, goal))
        update.stage()
        return update

    def bring(self, live: LiveModel, start: int | None, goal: int) -> None:
        update = self.staged(live, start, goal)
        update.commit()
        update.close()

    def runs(self, module: torch.nn.Module) -> int | None:
        """The version that the model computes with."""
        held = module.state_dict()
        same = (
            version
            for version, state in self.states.items()
            if all(torch.equal(held[name], state[name]) for name in NAMES)
        )
        return next(same, None)


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[Versions]:
    made = Versions(tmp_path / "store")
    with contextlib.closing(made.store):
        yield made


@pytest.fixture
def live_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LiveModel]:
    """A LiveModel of a module that no checkpoint was loaded into: its layout is known."""
    monkeypatch.setattr(live_model, "checkpoint_parameters", lambda folder: PARAMETERS)
    monkeypatch.setattr(live_model, "trace_layout", lambda *_: LAYOUT)

    def made(module: torch.nn.Module, *, captured: bool = False) -> LiveModel:
        return LiveModel(module, Path(), torch.float32, EngineRank(1, 0), captured=captured)

    return made


def pointed_elsewhere(module: Any) -> None:
    module.first.weight.data = module.first.weight.data.clone()


def offloaded_and_returned(module: Any) -> None:
    """`Module.to` moves each parameter so, by `data`; other devices than this one may not be here."""
    module.first._apply(torch.clone)


def new_parameter(module: Any) -> None:
    module.first.weight = torch.nn.Parameter(module.first.weight.clone(), requires_grad=False)


def registered_anew(module: Any) -> None:
    weight = module.first.weight.clone()
    del module.first.weight
    module.first.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))


def new_module(module: Any) -> None:
    module.first = copy.deepcopy(module.first)


def loaded_by_assignment(module: Any) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def re_laid(module: Any) -> None:
    """Both parameters into one block of memory, as optimizers and offloaders do."""
    flat = torch.cat([module.first.weight.view(-1), module.second.weight.view(-1)])
    for place, part in enumerate((module.first, module.second)):
        part.weight.data = flat.view(2, *SHAPE)[place]


def exchanged(module: Any) -> None:
    """Each gets the memory of the other, and its own weights there."""
    first, second = module.first.weight.data, module.second.weight.data
    kept = first.clone(), second.clone()
    module.first.weight.data, module.second.weight.data = second, first
    module.first.weight.copy_(kept[0])
    module.second.weight.copy_(kept[1])


MOVES = (
    pointed_elsewhere,
    offloaded_and_returned,
    new_parameter,
    registered_anew,
    new_module,
    loaded_by_assignment,
    re_laid,
    exchanged,
)
each_move = pytest.mark.parametrize("move", MOVES)


@each_move
def test_an_update_reaches_weights_that_have_moved(
    versions: Versions, live_of: Callable[..., LiveModel], move: Callable[[Any], None]
) -> None:
    module = Module()
    live = live_of(module)
    versions.bring(live, None, 1)
    goal = live.goal(versions.objects, versions.way(None, 1))
    move(module)
    goal.compare()
    versions.bring(live, 1, 2)
    assert versions.runs(module) == 2
    with pytest.raises(WrongBase):
        goal.compare()
    move(module)
    versions.bring(live, 2, 3)
    assert versions.runs(module) == 3


@each_move
def test_weights_that_moved_and_are_others_are_found_out_and_brought_anew(
    versions: Versions, live_of: Callable[..., LiveModel], move: Callable[[Any], None]
) -> None:
    module = Module()
    live = live_of(module)
    versions.bring(live, None, 1)
    goal = live.goal(versions.objects, versions.way(None, 1))
    move(module)
    module.first.weight[7, 7] += 1
    with pytest.raises(WrongBase):
        goal.compare()
    with pytest.raises(WrongBase):
        versions.staged(live, 1, 2)
    versions.bring(live, None, 2)
    assert versions.runs(module) == 2


@each_move
@pytest.mark.parametrize("start", [1, None], ids=["steps", "anew"])
def test_what_moves_between_stage_and_commit_is_not_written_to(
    versions: Versions, live_of: Callable[..., LiveModel], move: Callable[[Any], None], start: int | None
) -> None:
    module = Module()
    live = live_of(module)
    versions.bring(live, None, 1)
    update = versions.staged(live, start, 2)
    move(module)
    with pytest.raises(Moved, match="has been given other memory"):
        update.commit()
    assert versions.runs(module) == 1
    versions.bring(live, start, 2)
    assert versions.runs(module) == 2


@each_move
def test_a_worker_stages_anew_after_a_move_and_says_so_where_it_has_staged(
    versions: Versions, live_of: Callable[..., LiveModel], move: Callable[[Any], None]
) -> None:
    module, worker = Module(), WeightWorker()
    worker.rose_model = live_of(module)

    def stage(start: int | None, goal: int) -> str:
        worker.rose_stage(goal, str(versions.objects), versions.way(start, goal))
        assert worker.rose_stage_now is not None
        assert worker.rose_stage_now.thread is not None
        worker.rose_stage_now.thread.join(LONG_S)
        return str((worker.rose_staged() or {})["error"])

    assert (stage(None, 1), worker.rose_apply(1)) == ("", "")
    worker.rose_settled()
    move(module)
    assert (stage(1, 2), worker.rose_apply(2), versions.runs(module)) == ("", "", 2)
    worker.rose_settled()
    assert stage(2, 3) == ""
    move(module)
    assert "has been given other memory" in worker.rose_apply(3)
    assert "has been given other memory" in worker.rose_undo(), "nobody knows what the engine runs"
    assert (stage(None, 3), worker.rose_apply(3), versions.runs(module)) == ("", "", 3)


def test_a_model_with_other_parameters_than_it_was_loaded_with_is_refused(
    versions: Versions, live_of: Callable[..., LiveModel]
) -> None:
    """Such as a tied head that has become one of its own: no layout says what belongs there."""
    module = Module()
    module.head = module.first
    live = live_of(module)
    versions.bring(live, None, 1)
    update = versions.staged(live, 1, 2)
    module.head = copy.deepcopy(module.first)
    for attempt in (update.commit, lambda: versions.staged(live, 1, 2), lambda: versions.staged(live, None, 2)):
        with pytest.raises(TransferError, match=r"other parameters than when it was loaded: head\.weight came or went"):
            attempt()
    assert versions.runs(module) == 1


@each_move
def test_where_graphs_compute_with_the_memory_that_was_a_move_is_refused(
    versions: Versions, live_of: Callable[..., LiveModel], move: Callable[[Any], None]
) -> None:
    module = Module()
    live = live_of(module, captured=True)
    versions.bring(live, None, 1)
    goal = live.goal(versions.objects, versions.way(None, 1))
    update = versions.staged(live, 1, 2)
    move(module)
    for attempt in (update.commit, goal.compare, lambda: versions.staged(live, None, 2)):
        with pytest.raises(TransferError, match="captured graphs compute with what it had before"):
            attempt()
    assert versions.runs(module) == 1


def test_tensors_are_told_by_name_each_once_with_buffers() -> None:
    module = Module()
    module.head = module.first
    module.register_buffer("table", torch.ones(2))
    tensors = ModuleTensors(module)
    assert (list(tensors), len(tensors)) == ([*NAMES, "table"], 3)
    assert tensors["table"] is module.table
    assert "first.bias" not in tensors
    assert "third.weight" not in tensors
    assert "first" not in tensors
