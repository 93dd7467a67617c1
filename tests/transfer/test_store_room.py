"""Where a new version has no room: old ones go for it, as few as that takes, and none in vain."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from store_tools import publish_line, same, whole_files

from rose.simulator.small_model import PACKING, Bits, first_weights, moved
from rose_transfer.store import NoRoom, NoRoomForVersion, Objects, Store, StoreReader, chain
from rose_transfer.store.survey import verify

VERSIONS = 6
NEW = VERSIONS + 1


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[Bits]]]:
    """Version 4 is written whole as well: what comes before it leads only to itself."""
    folder = tmp_path_factory.mktemp("room") / "store"
    store = Store(folder)
    history = publish_line(store, 4, share=0.05)
    history[5] = first_weights(5)
    store.publish(5, PACKING, history[5])
    history[6] = moved(history[5], 0.05, 6)
    store.publish(6, PACKING, history[6], base=5)
    store.close()
    return folder, history


def opened(template: tuple[Path, dict[int, list[Bits]]], folder: Path, bytes_max: int) -> Store:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template[0], folder)
    return Store(folder, bytes_max=bytes_max)


def publishes(store: Store, new: list[Bits], refused: NoRoomForVersion) -> bool:
    """Whether room is made for the next version, as a publisher makes it; then it is there."""
    version, base = store.versions()[-1] + 1, store.newest
    while store.make_room(refused.objects, renew=refused.renew):
        try:
            store.publish(version, PACKING, new, base=base)
        except NoRoomForVersion as again:
            refused = again
        else:
            return True
    return False


@pytest.mark.parametrize("pinned", [(), (1,), (2, 4)], ids=["nothing pinned", "the oldest one", "two of them"])
@pytest.mark.parametrize("share", [0.02, 0.9], ids=["a small step", "a large one"])
def test_whatever_the_limit_versions_go_only_if_that_helps(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]], pinned: tuple[int, ...], share: float
) -> None:
    _, history = template
    new = moved(history[VERSIONS], share, NEW)
    used = StoreReader(template[0]).objects.used_bytes
    went: list[int] = []
    # Where a version is written whole, to keep a way out, more go for it than for the step.
    fewer: dict[bool, list[int]] = {False: [], True: []}
    for bytes_max in range(used // 8, 2 * used, used // 12):
        store = opened(template, tmp_path / "store", bytes_max)
        for version in pinned:
            store.pin(version)
        before = whole_files(store.folder)
        try:
            store.publish(NEW, PACKING, new, base=VERSIONS)
            went.append(0)
        except NoRoomForVersion as error:
            assert whole_files(store.folder) == before
            if publishes(store, new, error):
                assert store.versions()[-2:] == (VERSIONS, NEW)
                assert {*pinned} <= {*store.versions()}
                went.append(NEW - len(store.versions()))
                assert store.objects.used_bytes <= bytes_max
            else:
                assert store.versions() == tuple(range(1, NEW)), "nothing was given up in vain"
                went.append(-1)
        assert verify(store) == ()
        assert all(same(list(store.read(version)), ({**history, NEW: new})[version]) for version in store.versions())
        if went[-1] >= 0:
            fewer[(None, NEW) in {(link.base, link.version) for link in store.links()}].append(went[-1])
        store.close()
    helped = [number for number in went if number >= 0]
    assert went == [-1] * (len(went) - len(helped)) + helped, "with more room it helps no less"
    assert all(numbers == sorted(numbers, reverse=True) for numbers in fewer.values()), "and fewer go"
    assert pinned or helped[0] > 0
    assert helped[-1] == 0
    assert went[0] == -1


def test_a_version_that_alone_is_too_large_costs_nothing(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = StoreReader(template[0]).objects.used_bytes
    store = opened(template, tmp_path / "store", used)
    monkeypatch.setattr(chain, "needed", None)
    assert not store.make_room({"0" * 64: used + 1})
    assert store.versions() == tuple(range(1, NEW))


def test_shorter_ways_are_made_before_a_version_is_refused(tmp_path: Path) -> None:
    """Every version changes the same elements again, and nothing but the newest one may stay."""
    store = Store(tmp_path)
    history = {1: first_weights(1)}
    store.publish(1, PACKING, history[1])
    for version in range(2, 10):
        history[version] = [bits.copy() for bits in history[1]]
        for bits in history[version]:
            bits[::7] ^= version
        store.publish(version, PACKING, history[version], base=version - 1)
    used, dense = store.objects.used_bytes, sum(bits.nbytes for bits in history[1])
    store.close()
    store = Store(tmp_path, bytes_max=used + dense // 2)
    new = first_weights(10)
    with pytest.raises(NoRoomForVersion) as told:
        store.publish(10, PACKING, new, base=9)
    assert publishes(store, new, told.value)
    assert store.versions()[-2:] == (9, 10)
    assert verify(store) == ()


def test_a_way_that_is_lost_while_room_is_looked_for_is_gone_round(
    tmp_path: Path, template: tuple[Path, dict[int, list[Bits]]]
) -> None:
    used = StoreReader(template[0]).objects.used_bytes
    store = opened(template, tmp_path / "store", used)
    (damaged,) = (found for found in store.manifests() if (found.base, found.version) == (1, 2))
    store.leave_out(damaged, "its disk is old")
    with pytest.raises(NoRoomForVersion) as told:
        store.publish(NEW, PACKING, first_weights(NEW))
    store.make_room(told.value.objects)
    assert store.versions()[-1] == VERSIONS


def test_what_a_disk_has_left_counts_as_well_as_the_limit(tmp_path: Path) -> None:
    objects = Objects(tmp_path, bytes_max=1000)
    key = objects.put(b"1" * 600)
    assert objects.free_bytes() == 400
    assert objects.would_fit([key], {"a": 400})
    assert not objects.would_fit([key], {"a": 401})
    assert objects.would_fit([], {"a": 1000})
    assert objects.would_fit([key], {key: 600, "a": 400}), "what is there takes no more room"
    with pytest.raises(NoRoom, match="401 bytes needed, 400 free of 1000"):
        objects.put(b"2" * 401)
    free = shutil.disk_usage(tmp_path).free
    assert not Objects(tmp_path).would_fit([key], {"a": 2 * free})
