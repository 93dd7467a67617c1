"""Live weights of odd ranks are brought from any version to any other, to the bit, or stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from live_tools import SHAPES, VOCAB, Line, first_state, memory_for, rank_layout, same_bits

from rose.errors import TransferError
from rose_transfer.codec import Delta, MalformedDelta, WrongBase, overwrite_changed
from rose_transfer.layout.layout import Layout
from rose_transfer.live import LiveUpdate, LiveWeights, Mixed, RolledBack, staged
from rose_transfer.live.live_weights import Moved, OtherForm
from rose_transfer.store import Step, object_key
from rose_transfer.store.packing import pack_for

RANKS = {
    "whole": [rank_layout()],
    "whole, float32": [rank_layout(dtype="float32")],
    "whole, head twice": [rank_layout(twice=True)],
    "two ranks": [rank_layout(0, 2), rank_layout(1, 2)],
    "four ranks, float32": [rank_layout(rank, 4, dtype="float32") for rank in range(4)],
}


@pytest.fixture(params=RANKS.values(), ids=RANKS.keys())
def ranks(request: pytest.FixtureRequest) -> list[Layout]:
    found: list[Layout] = request.param
    return found


def update(line: Line, weights: LiveWeights, steps: tuple[Step, ...]) -> LiveUpdate:
    return LiveUpdate(weights, steps, line.store.objects.read, line.store.folder)


@pytest.mark.parametrize(("start", "goal"), [(1, 2), (1, 3), (3, 1), (2, 2), (3, 2)])
def test_ranks_get_from_version_to_version(tmp_path: Path, ranks: list[Layout], start: int, goal: int) -> None:
    line = Line(tmp_path, ranks)
    for layout in ranks:
        weights, memory = line.live(layout, start)
        change = update(line, weights, line.store.steps(start, goal))
        change.stage()
        assert same_bits(memory, memory_for(layout, line.states[start]))
        change.commit()
        assert same_bits(memory, memory_for(layout, line.states[goal]))
        change.roll_back()
        assert same_bits(memory, memory_for(layout, line.states[start]))


@pytest.mark.parametrize("budget", [2**26, 0], ids=["in memory", "in a file"])
def test_one_who_holds_any_weights_begins_anew_and_gets_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: list[Layout], budget: int
) -> None:
    monkeypatch.setattr(staged, "MEMORY_BYTES_MAX", budget)
    line = Line(tmp_path, ranks)
    for layout in ranks:
        memory = memory_for(layout, first_state(seed=99))
        change = update(line, LiveWeights(layout, line.packing, memory), line.store.steps(None, 3))
        change.stage()
        assert same_bits(memory, memory_for(layout, first_state(seed=99)))
        change.commit()
        assert same_bits(memory, memory_for(layout, line.states[3]))
        change.roll_back()
        assert same_bits(memory, memory_for(layout, first_state(seed=99)))


def test_what_is_no_version_is_overwritten_and_gone(tmp_path: Path) -> None:
    layout = rank_layout(dtype="float32")
    line = Line(tmp_path, [layout])
    memory = memory_for(layout, first_state(seed=99))
    memory["norm"][3] = 0.1
    change = update(line, LiveWeights(layout, line.packing, memory), line.store.steps(None, 3))
    change.stage()
    change.commit()
    assert same_bits(memory, memory_for(layout, line.states[3]))
    with pytest.raises(Mixed, match=r"cannot be taken back: .* none of the published form were overwritten"):
        change.roll_back()


@pytest.mark.parametrize("budget", [2**26, 0], ids=["in memory", "in a file"])
def test_what_cannot_be_taken_back_goes_on_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """One bucket was overwritten, the others were changed in steps, which cannot be done twice."""
    monkeypatch.setattr(staged, "MEMORY_BYTES_MAX", budget)
    layout = rank_layout(dtype="float32")
    line = Line(tmp_path, [layout], bucket_bytes=2**16)
    memory = memory_for(layout, first_state(seed=99))
    memory["norm"][3] = 0.1
    goal = memory_for(layout, line.states[3])
    change = update(line, LiveWeights(layout, line.packing, memory), line.store.steps(None, 3))
    change.stage()
    change.commit()
    for _ in range(2):
        with pytest.raises(Mixed):
            change.roll_back()
        assert not same_bits(memory, goal)
        change.commit()
        assert same_bits(memory, goal)


@pytest.mark.parametrize("failing_at", [0, 1, 7, 20])
def test_a_commit_that_failed_and_cannot_be_taken_back_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_at: int
) -> None:
    """The disk fails while a delta is read, and then while those before it are read to be taken back."""
    monkeypatch.setattr(staged, "MEMORY_BYTES_MAX", 0)
    layout = rank_layout()
    line = Line(tmp_path, [layout], bucket_bytes=2**16)
    weights, memory = line.live(layout, 1)
    change = update(line, weights, line.store.steps(1, 3))
    change.stage()
    reads, read = 0, staged.StagedDeltas.get

    def dying(deltas: staged.StagedDeltas, place: tuple[int, int]) -> Delta:
        nonlocal reads
        reads += 1
        if reads > failing_at:
            raise TransferError("the disk is away")
        return read(deltas, place)

    monkeypatch.setattr(staged.StagedDeltas, "get", dying)
    with pytest.raises(Mixed if failing_at else RolledBack, match="the disk is away"):
        change.commit()
    monkeypatch.setattr(staged.StagedDeltas, "get", read)
    change.commit()
    assert same_bits(memory, memory_for(layout, line.states[3]))
    change.roll_back()
    assert same_bits(memory, memory_for(layout, line.states[1]))


@pytest.mark.parametrize("value", [7.0, 0.1], ids=["another", "of another form"])
def test_what_others_changed_while_weights_were_mixed_is_no_version(tmp_path: Path, value: float) -> None:
    layout = rank_layout(dtype="float32")
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    change = update(line, weights, line.store.steps(1, 2))
    change.stage()
    change.commit()
    changed = memory["down_proj"] != memory_for(layout, line.states[1])["down_proj"]
    memory["down_proj"][changed] = value
    with pytest.raises(Mixed, match="cannot be taken back"):
        change.roll_back()
    for _ in range(2):
        with pytest.raises(Mixed, match="changed by others"):
            change.commit()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_weights_than_the_base_are_refused_before_anything_is_written(tmp_path: Path, dtype: str) -> None:
    layout = rank_layout(dtype=dtype)
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    memory["gate_up"][-1, -1] = 1.5
    kept = {name: tensor.clone() for name, tensor in memory.items()}
    change = update(line, weights, line.store.steps(1, 2))
    with pytest.raises(WrongBase, match="in memory has hash"):
        change.stage()
    with pytest.raises(TransferError, match="nothing is staged"):
        change.commit()
    assert same_bits(memory, kept)


def test_what_is_no_bfloat16_is_refused(tmp_path: Path) -> None:
    layout = rank_layout(dtype="float32")
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    memory["norm"][3] = 0.1
    with pytest.raises(TransferError, match="is no bfloat16"):
        update(line, weights, line.store.steps(1, 2)).stage()


@pytest.mark.parametrize("start", [1, 3], ids=["forwards", "backwards"])
@pytest.mark.parametrize("budget", [2**26, 0], ids=["in memory", "in a file"])
def test_every_tile_that_fails_takes_the_update_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, budget: int
) -> None:
    """Memory that changes between stage and commit, at the first changed element of each tensor in turn."""
    monkeypatch.setattr(staged, "MEMORY_BYTES_MAX", budget)
    layout = rank_layout()
    line = Line(tmp_path, [layout])
    steps = line.store.steps(start, 2)
    goal = memory_for(layout, line.states[2])
    for name in layout.tensors:
        weights, memory = line.live(layout, start)
        change = update(line, weights, steps)
        change.stage()
        flat, new = memory[name].view(-1), goal[name].view(-1)
        at = int(torch.nonzero((flat != new) & ~torch.isnan(flat))[0])
        flat[at] = 7.0
        kept = {key: tensor.clone() for key, tensor in memory.items()}
        with pytest.raises(RolledBack, match="was taken back"):
            change.commit()
        assert same_bits(memory, kept), name


@pytest.mark.parametrize("start", [1, None], ids=["steps", "anew"])
@pytest.mark.parametrize("written", [0, 1, 5])
def test_weights_left_half_written_are_never_called_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int | None, written: int
) -> None:
    """Memory that fails in the middle of a run, as that of a device may."""
    layout = rank_layout(dtype="float32")
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    change = update(line, weights, line.store.steps(start, 2))
    change.stage()
    real, copies = torch.Tensor.copy_, 0

    def failing(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        nonlocal copies
        if tensor.dtype == torch.float32:
            copies += 1
            if copies > written:
                raise MemoryError("no memory on the device")
        return real(tensor, source)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", failing)
        with pytest.raises(Mixed, match=r"no memory on the device.*left half-written"):
            change.commit()
    for again in (change.roll_back, change.commit):
        with pytest.raises(Mixed, match="left half-written"):
            again()
    change.close()
    anew = update(line, weights, line.store.steps(None, 2))
    anew.stage()
    anew.commit()
    assert same_bits(memory, memory_for(layout, line.states[2]))


def test_a_stage_that_is_given_up_ends(tmp_path: Path) -> None:
    layout = rank_layout()
    line = Line(tmp_path, [layout])
    weights, _ = line.live(layout, 1)
    change = update(line, weights, line.store.steps(1, 2))
    with pytest.raises(TransferError, match="given up"):
        change.stage(lambda: True)
    with pytest.raises(TransferError, match="nothing is staged"):
        change.commit()


def test_float32_memory_is_staged_in_the_room_of_a_bucket(tmp_path: Path) -> None:
    layout = rank_layout(dtype="float32")
    line = Line(tmp_path, [layout])
    weights, _ = line.live(layout, 1)
    change = update(line, weights, line.store.steps(1, 2))
    with torch.profiler.profile(profile_memory=True) as profile:
        change.stage()
    largest = max((event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0), default=0)
    assert largest <= max(bucket.dense_bytes for bucket in line.packing.buckets)


def test_a_rollback_that_fails_is_told_apart(tmp_path: Path) -> None:
    layout = rank_layout()
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    change = update(line, weights, line.store.steps(1, 2))
    change.stage()
    change.commit()
    changed = memory["down_proj"] != memory_for(layout, line.states[1])["down_proj"]
    memory["down_proj"][changed] = 7.0
    with pytest.raises(Mixed, match="cannot be taken back"):
        change.roll_back()


def test_a_damaged_object_stops_the_stage(tmp_path: Path) -> None:
    layout = rank_layout()
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    steps = line.store.steps(1, 2)
    other = line.store.steps(2, 3)[0].manifest.buckets
    for index, entry in enumerate(steps[0].manifest.buckets):
        swapped = {entry.key: line.store.objects.read(other[index].key)}
        change = LiveUpdate(
            weights,
            steps,
            lambda key, swapped=swapped: swapped.get(key) or line.store.objects.read(key),
            tmp_path,
        )
        with pytest.raises(MalformedDelta, match="is another delta"):
            change.stage()
    assert same_bits(memory, memory_for(layout, line.states[1]))


def test_a_whole_version_that_holds_only_a_part_is_refused(tmp_path: Path) -> None:
    """Nothing without a base may leave an element as it happens to be."""
    layout = rank_layout()
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    (whole,) = line.store.steps(None, 1)
    entries, objects = [], {}
    pairs = zip(whole.manifest.buckets, line.store.read(2), line.store.read(1), strict=True)
    for entry, old, new in pairs:
        data = overwrite_changed(old, new, entry.after).to_wire()
        objects[object_key(data)] = data
        entries.append(replace(entry, key=object_key(data), encoded_bytes=len(data)))
    part = Step(replace(whole.manifest, buckets=tuple(entries)), backwards=False)
    with pytest.raises(MalformedDelta, match="is another delta"):
        LiveUpdate(weights, [part], objects.__getitem__, tmp_path).stage()
    assert same_bits(memory, memory_for(layout, line.states[1]))


def test_steps_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    layout = rank_layout()
    line = Line(tmp_path, [layout])
    weights, _ = line.live(layout, 1)
    first, second = line.store.steps(1, 2)[0], line.store.steps(2, 3)[0]
    anew = line.store.steps(None, 1)[0]
    for steps, wrong in (((first, first), "after the step before"), ((second,), "in memory"), ((first, anew), "anew")):
        with pytest.raises(TransferError, match=wrong):
            update(line, weights, steps).stage()


def test_a_closed_update_is_over(tmp_path: Path) -> None:
    layout = rank_layout()
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    change = update(line, weights, line.store.steps(1, 2))
    change.stage()
    change.close()
    with pytest.raises(TransferError, match="nothing is staged"):
        change.commit()
    assert same_bits(memory, memory_for(layout, line.states[1]))


def test_padding_stays_zero(tmp_path: Path) -> None:
    ranks = [rank_layout(rank, 2) for rank in range(2)]
    line = Line(tmp_path, ranks)
    weights, memory = line.live(ranks[1], 1)
    change = update(line, weights, line.store.steps(1, 3))
    change.stage()
    change.commit()
    (pad,) = ranks[1].pads
    assert not memory["embed_tokens"][pad.box.starts[0] :].any()


def test_a_rank_for_which_nobody_packed_is_refused(tmp_path: Path) -> None:
    packing = pack_for([rank_layout()])
    layout = rank_layout(0, 2)
    memory = memory_for(layout, first_state())
    with pytest.raises(TransferError, match="rank 0 of 2 holds only a part of bucket"):
        LiveWeights(layout, packing, memory)


def test_ranks_hold_their_share_of_the_buckets() -> None:
    ranks = [rank_layout(rank, 4) for rank in range(4)]
    packing = pack_for(ranks)
    shares = [LiveWeights(layout, packing, memory_for(layout, first_state())).places for layout in ranks]
    assert set().union(*shares) == set(range(len(packing.buckets)))
    own = [sum(packing.buckets[place].dense_bytes for place in places) for places in shares]
    replicated = sum(SHAPES[name].shape[0] * SHAPES[name].shape[-1] * 2 for name in ("k", "mixer"))
    assert max(own) < packing.dense_bytes / 4 + replicated + 8 * 96 * 4 + 1000


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda memory: memory.pop("qk"), "qk is not there"),
        (lambda memory: memory.update(qk=torch.zeros(0, dtype=torch.bfloat16)), r"qk is \(\(0,\), 'bfloat16'\)"),
        (lambda memory: memory.update(qk=memory["qk"].t().contiguous().t()), "qk is"),
        (lambda memory: memory.update(qk=memory["qk"].half()), "float16"),
    ],
    ids=["missing", "packed", "transposed", "another dtype"],
)
def test_memory_that_is_not_as_it_was_loaded_is_refused(change, wrong: str) -> None:  # type: ignore[no-untyped-def]
    layout = rank_layout()
    memory = memory_for(layout, first_state())
    change(memory)
    with pytest.raises(TransferError, match=wrong):
        LiveWeights(layout, pack_for([layout]), memory)


def pointed_elsewhere(memory: dict[str, torch.Tensor]) -> None:
    """What an offload and return leaves."""
    memory["qk"].data = memory["qk"].data.clone()


def set_to_a_copy(memory: dict[str, torch.Tensor]) -> None:
    memory["qk"].set_(memory["qk"].clone())


def re_laid(memory: dict[str, torch.Tensor]) -> None:
    """Into one block of memory, each tensor at its place in it."""
    flat = torch.cat([memory["qk"].view(-1), memory["norm"].view(-1)])
    at = memory["qk"].numel()
    memory["qk"].data, memory["norm"].data = flat[:at].view(memory["qk"].shape), flat[at:]


MOVES: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "data": pointed_elsewhere,
    "another tensor": lambda memory: memory.update(qk=memory["qk"].clone()),
    "set_": set_to_a_copy,
    "re-laid": re_laid,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_weights_that_moved_are_found_where_they_lie(
    tmp_path: Path, move: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    """Nothing is written to where they lay, and no version is said to be in force there."""
    layout = rank_layout()
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    change = update(line, weights, line.store.steps(1, 2))
    change.stage()
    assert weights.found_anew() is weights
    move(memory)
    with pytest.raises(Moved, match=r"(qk|norm) has been given other memory"):
        change.commit()
    with pytest.raises(Mixed, match=r"(qk|norm) has been given other memory"):
        change.roll_back()
    assert same_bits(memory, memory_for(layout, line.states[1]))
    change = update(line, weights.found_anew(), line.store.steps(1, 2))
    change.stage()
    change.commit()
    assert same_bits(memory, memory_for(layout, line.states[2]))
    move(memory)
    with pytest.raises(Mixed, match=r"(qk|norm) has been given other memory"):
        change.roll_back()
    assert same_bits(memory, memory_for(layout, line.states[2]))


@pytest.mark.parametrize(
    ("leave", "wrong"),
    [
        (lambda memory: memory.update(qk=memory["qk"].to("meta")), "qk has no memory now"),
        (lambda memory: memory["qk"].untyped_storage().resize_(0), "qk has no memory now"),
        (lambda memory: memory.pop("qk"), "qk is not there"),
        (lambda memory: memory.update(qk=torch._neg_view(memory["qk"])), "qk is"),
        (lambda memory: setattr(memory["qk"], "data", memory["qk"].t()), "qk is"),
        (lambda memory: setattr(memory["qk"], "data", memory["qk"].float()), "qk is"),
    ],
    ids=["to meta", "emptied", "gone", "negated", "transposed", "another dtype"],
)
def test_weights_that_moved_to_where_no_update_can_reach_them_are_refused(  # type: ignore[no-untyped-def]
    tmp_path: Path, leave, wrong: str
) -> None:
    layout = rank_layout()
    weights, memory = Line(tmp_path, [layout]).live(layout, 1)
    leave(memory)
    with pytest.raises(TransferError, match=wrong):
        weights.found_anew()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("changed", ["embed_tokens", "head"])
@pytest.mark.parametrize("row", [0, 5, VOCAB - 1])
def test_each_of_two_copies_is_compared(tmp_path: Path, dtype: str, changed: str, row: int) -> None:
    layout = rank_layout(dtype=dtype, twice=True)
    line = Line(tmp_path, [layout])
    weights, memory = line.live(layout, 1)
    change = update(line, weights, line.store.steps(1, 2))
    change.stage()
    memory[changed][row, 5] = 1.5
    kept = {name: tensor.clone() for name, tensor in memory.items()}
    with pytest.raises(RolledBack, match="differs from another copy"):
        change.commit()
    with pytest.raises(OtherForm, match="differs from another copy of the same weights"):
        update(line, weights, line.store.steps(1, 2)).stage()
    assert same_bits(memory, kept)
    change = update(line, weights, line.store.steps(None, 2))
    change.stage()
    change.commit()
    assert same_bits(memory, memory_for(layout, line.states[2]))


def test_a_dtype_that_cannot_keep_the_published_bits_is_refused() -> None:
    layout = rank_layout(dtype="float16")
    with pytest.raises(TransferError, match="as float16, which cannot keep every bfloat16"):
        LiveWeights(layout, pack_for([layout]), memory_for(layout, first_state()))
