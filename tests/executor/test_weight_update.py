"""Weights changed in a live engine: exact, between steps, all or nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rose.errors import ContractError, EngineError, TransferError
from rose.records import Finish, VersionSpan
from rose_executor.fresh_probe import ProbeScores, compare, probe_fresh, probe_live
from rose_executor.launcher import Command
from rose_transfer import snapshot
from rose_transfer.layout.layout import Parameter
from rose_transfer.snapshot import WEIGHTS
from rose_transfer.store import Store
from rose_transfer.store.buckets import pack
from rose_transfer.store.packing import pack_whole

pytestmark = pytest.mark.engine

PARITY_MAX = 1e-4
PREFIXES = [[(3 + 7 * i + 5 * j) % 90 for j in range(10 + 9 * i)] for i in range(6)]

# Long enough to be under way still when the update comes.
LENGTH = 480

Weights = dict[str, torch.Tensor]


def prompt(index: int) -> list[int]:
    return [*PREFIXES[index % len(PREFIXES)][:10], index]


@pytest.fixture
def masters(tiny_model: Path) -> Weights:
    return {name: tensor.to(torch.float32) for name, tensor in load_file(tiny_model / WEIGHTS).items()}


@dataclass(frozen=True)
class Made:
    """A version as an engine is told of it, and as a folder that a fresh engine loads."""

    version: int
    objects: Path
    way: tuple[tuple[str, bool], ...]
    path: Path


class Versions:
    """A store of versions of the engine's model; the engine runs version 0, its model folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.store = Store(folder / "store")
        self.publish(0, load_file(model / WEIGHTS))

    def publish(self, version: int, weights: Weights, start: int | None = 0) -> Made:
        """`version` in deltas from `start`, None for all of it."""
        packing = pack_whole({name: Parameter(tuple(value.shape), "bfloat16") for name, value in weights.items()})
        self.store.publish(version, packing, pack(packing, weights), self.store.newest)
        return self.made(version, weights, start)

    def made(self, version: int, weights: Weights, start: int | None) -> Made:
        path = snapshot.version_folder(self.folder / "folders", version)
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        if version and not path.exists() and shapes == snapshot.model_shapes(self.model):
            snapshot.write(self.folder / "folders", version, weights, self.model)
        way = () if start == version else self.store.delta(start, version)
        keys = tuple((step.manifest.key, step.backwards) for step in way)
        return Made(version, self.store.folder / "objects", keys, path)


@pytest.fixture
def versions(rig: Any, tmp_path: Path) -> Versions:
    return Versions(tmp_path, rig.model)


def updated(masters: Weights, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in masters.items()}


async def fresh(rig: Any, folder: Path, prefixes: Sequence[Sequence[int]] = PREFIXES) -> ProbeScores:
    return await probe_fresh(
        rig.warm,
        folder,
        prefixes,
        work_dir=rig.folder,
        log_path=rig.folder / "probe.log",
        waits=rig.waits,
        max_model_len=512,
    )


async def change(rig: Any, made: Made, *, keep_kv: bool = False) -> Any:
    return await rig.engine.control.apply(made.version, made.objects, made.way, keep_kv=keep_kv)


@pytest.mark.each_vllm
def test_after_each_update_the_live_engine_is_a_fresh_one(fresh_rig: Any, masters: Weights, versions: Versions) -> None:
    """Forwards, back again, and anew; the last from a third version on, in one step."""
    rig = fresh_rig

    async def run() -> None:
        before = await probe_live(rig.route(), PREFIXES, request_prefix="v0")
        assert compare(before, await fresh(rig, rig.model)) <= PARITY_MAX
        weights = {version: updated(masters, version) for version in (1, 2, 3)}
        for version, value in weights.items():
            versions.publish(version, value)
        for number, (start, goal) in enumerate([(0, 1), (1, 3), (3, 2), (None, 1)]):
            made = versions.made(goal, weights[goal], start)
            committed = await change(rig, made)
            assert committed.pause_ms >= committed.load_ms > 0
            described = await rig.engine.control.describe()
            assert (described.weight_version, described.paused, described.poisoned) == (goal, False, "")
            assert rig.engine.page.version == goal
            after = await probe_live(rig.route(), PREFIXES, request_prefix=f"n{number}")
            assert compare(after, await fresh(rig, made.path)) <= PARITY_MAX
            assert _differs(after, before)
            before = after

    rig.run(run())


def _differs(one: ProbeScores, other: ProbeScores) -> bool:
    try:
        return compare(one, other) > 100 * PARITY_MAX
    except ContractError:
        return True


@pytest.mark.each_vllm
def test_an_update_in_mid_stream_is_stamped_and_exact(fresh_rig: Any, masters: Weights, versions: Versions) -> None:
    """Eight greedy streams; each goes on exactly as a fresh engine would from the token where it changed."""
    rig = fresh_rig

    async def run() -> None:
        made = versions.publish(1, updated(masters, 1))
        progress: dict[int, int] = dict.fromkeys(range(8), 0)

        async def stream(index: int) -> Any:
            def count(ids: tuple[int, ...]) -> None:
                progress[index] += len(ids)

            return await rig.route().generate(
                f"stream-{index}",
                prompt(index),
                max_tokens=LENGTH,
                temperature=0.0,
                stop_token_ids=(),
                top_logprobs=20,
                on_tokens=count,
            )

        streams = [asyncio.create_task(stream(index)) for index in range(8)]
        async with asyncio.timeout(30):
            while min(progress.values()) < 1:
                await asyncio.sleep(0.002)
        # Held while the test, which may be starved of its core, gets round to it.
        await rig.engine.control.pause()
        await change(rig, made)
        assert (await rig.engine.control.describe()).paused
        await rig.engine.control.resume()
        outputs = await asyncio.wait_for(asyncio.gather(*streams), 60)
        assert rig.engine.page.total() >= 8 * LENGTH
        prefixes, live = [], []
        for index, output in enumerate(outputs):
            old, new = output.versions
            assert (old.version, new.version, new.end) == (0, 1, LENGTH)
            assert output.finish is Finish.LENGTH
            count = rig.engine.page.request(f"stream-{index}")
            assert (count.tokens, count.first_version, count.last_version) == (LENGTH, 0, 1)
            for at in (new.start, new.start + 1, LENGTH - 1):
                prefixes.append([*prompt(index), *output.output_ids[:at]])
                live.append(output.top[at])
        assert compare(ProbeScores(tuple(live)), await fresh(rig, made.path, prefixes)) <= PARITY_MAX

    rig.run(run())


@pytest.mark.each_vllm
def test_kept_keys_and_values_are_read_by_nobody_else(fresh_rig: Any, masters: Weights, versions: Versions) -> None:
    """Streams go on with theirs; whoever asks for the same tokens then gets what a fresh engine says."""
    rig = fresh_rig

    async def paused_streams(attempt: int) -> tuple[str, list[list[int]], list[asyncio.Task[Any]]]:
        """What they are called, prompts, and their answers, paused before the last has filled a block of 32 tokens."""
        prompts = [[(5 + attempt + 11 * i + 3 * j) % 90 for j in range(length)] for i, length in enumerate((80, 10, 3))]
        name, progress = f"kept-{attempt}", dict.fromkeys(range(3), 0)

        def stream(index: int) -> asyncio.Task[Any]:
            def count(ids: tuple[int, ...]) -> None:
                progress[index] += len(ids)

            answer = rig.route().generate(
                f"{name}-{index}",
                prompts[index],
                max_tokens=400,
                temperature=0.0,
                stop_token_ids=(),
                on_tokens=count,
            )
            return asyncio.create_task(answer)

        streams = [stream(index) for index in range(3)]
        async with asyncio.timeout(30):
            while min(progress.values()) < 4:
                await asyncio.sleep(0.002)
        await rig.engine.control.pause()
        if progress[2] < 28:
            return name, prompts, streams
        # Somebody else had the machine.
        await rig.engine.control.resume()
        await asyncio.wait_for(asyncio.gather(*streams), 60)
        return await paused_streams(attempt + 1)

    async def same_as_fresh(name: str, path: Path, prefixes: list[list[int]]) -> None:
        live = await probe_live(rig.route(), prefixes, request_prefix=name)
        assert compare(live, await fresh(rig, path, prefixes)) <= PARITY_MAX

    async def run() -> None:
        made = versions.publish(1, updated(masters, 1))
        again = versions.publish(2, updated(masters, 2), start=1)
        name, prompts, streams = await paused_streams(0)
        await change(rig, made, keep_kv=True)
        await rig.engine.control.resume()
        # Blocks of the prompts were filled before the update, and are in use.
        await same_as_fresh("during", made.path, prompts)
        outputs = await asyncio.wait_for(asyncio.gather(*streams), 60)
        whole = []
        for index, output in enumerate(outputs):
            assert [span.version for span in output.versions] == [0, 1]
            count = rig.engine.page.request(f"{name}-{index}")
            assert (count.tokens, count.first_version, count.last_version) == (400, 0, 1)
            whole.append([*prompts[index], *output.output_ids])
        # So were others after it, behind contexts of before; they are free now.
        await same_as_fresh("after", made.path, [tokens[:size] for tokens in whole for size in (64, 160, 300, 400)])
        await change(rig, again, keep_kv=True)
        await same_as_fresh("later", again.path, [tokens[:size] for tokens in whole for size in (80, 300)])

    rig.run(run())


def _flip(made: Made) -> None:
    for file in made.objects.iterdir():
        if file.name not in {key for key, _ in made.way}:
            data = bytearray(file.read_bytes())
            data[-3] ^= 4
            file.write_bytes(data)


def _lose(made: Made) -> None:
    for file in made.objects.iterdir():
        if file.name not in {key for key, _ in made.way}:
            file.unlink()


def _spoil_manifest(made: Made) -> None:
    (made.objects / made.way[0][0]).write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_flip, "are not what they were"),
        (_lose, "is not there"),
        (_spoil_manifest, "are not what they were"),
        (lambda made: (made.objects / made.way[0][0]).unlink(), "is not there"),
    ],
)
def test_a_spoiled_version_is_refused_and_the_old_one_serves(
    rig: Any, masters: Weights, versions: Versions, spoil: Callable[[Made], object], why: str
) -> None:
    made = versions.publish(4, updated(masters, 4))
    spoil(made)
    refused(rig, made, why)


def test_a_way_that_begins_or_ends_elsewhere_is_refused(rig: Any, masters: Weights, versions: Versions) -> None:
    versions.publish(4, updated(masters, 4))
    weights = updated(masters, 5)
    made = versions.publish(5, weights, start=4)
    refused(rig, made, "in memory has hash")
    refused(rig, replace(made, version=6), "a way to version 5")
    refused(rig, replace(made, way=()), "a way to version nothing")


@pytest.mark.parametrize(
    ("reshape", "why"),
    [
        (lambda w: {n: t for n, t in w.items() if n != "model.norm.weight"}, r"the version has none"),
        (lambda w: {**w, "model.norm.weight": torch.ones(32)}, r"the version has \(32,\)"),
    ],
)
def test_a_whole_version_of_another_model_is_refused(
    rig: Any, masters: Weights, versions: Versions, reshape: Callable[[Weights], Weights], why: str
) -> None:
    refused(rig, versions.publish(4, reshape(updated(masters, 4)), start=None), why)


def refused(rig: Any, made: Made, why: str) -> None:
    async def run() -> None:
        before = await probe_live(rig.route(), PREFIXES, request_prefix=f"before-{made}")
        with pytest.raises(TransferError, match=why):
            await rig.engine.control.stage(made.version, made.objects, made.way)
        with pytest.raises(EngineError, match="not staged"):
            await rig.engine.control.commit(made.version)
        described = await rig.engine.control.describe()
        assert (described.weight_version, described.paused, described.poisoned) == (0, False, "")
        after = await probe_live(rig.route(), PREFIXES, request_prefix=f"after-{made}")
        assert compare(before, after) <= PARITY_MAX

    rig.run(run())


def test_only_the_staged_version_can_be_committed(rig: Any, masters: Weights, versions: Versions) -> None:
    async def run() -> None:
        made = versions.publish(4, updated(masters, 4))
        staged = await rig.engine.control.stage(4, made.objects, made.way)
        assert staged.encoded_bytes == versions.store.manifests()[-1].encoded_bytes
        with pytest.raises(EngineError, match="version 5 is not staged"):
            await rig.engine.control.commit(5)
        assert (await rig.engine.control.describe()).weight_version == 0

    rig.run(run())


def test_packed_weights_are_refused_instead_of_half_updated(rig: Any, masters: Weights, versions: Versions) -> None:
    """With vLLM's own packing an update in place would miss a tied head without any error."""

    async def run() -> None:
        engine = rig.new_engine("engine-packed", unpacked_weights=False)
        await engine.start(0)
        try:
            made = versions.publish(1, updated(masters, 1))
            with pytest.raises(TransferError, match="is packed and cannot be replaced in place"):
                await engine.control.stage(1, made.objects, made.way)
            assert (await engine.control.describe()).weight_version == 0
        finally:
            await engine.stop()
            engine.page.discard()

    rig.run(run())


def test_an_engine_starts_from_a_published_version(rig: Any, masters: Weights, tmp_path: Path) -> None:
    async def run() -> None:
        made = snapshot.write(tmp_path, 3, updated(masters, 3), rig.model)
        engine = rig.new_engine("engine-three")
        await engine.start(3, made.path)
        try:
            from rose_executor.token_route import TokenRoute

            route = TokenRoute(engine.base_url, rig.session)
            output = await route.generate("r", [5], max_tokens=3, temperature=1.0, stop_token_ids=())
            assert output.versions == (VersionSpan(3, 0, 3),)
        finally:
            await engine.stop()
            engine.page.discard()

    rig.run(run())


def test_a_fresh_engine_killed_from_outside_is_made_again(rig: Any, tmp_path: Path) -> None:
    @dataclass
    class Killing:
        """Kills the first child as soon as it runs."""

        launches: int = 0

        async def launch(self, command: Command) -> Any:
            child = await rig.warm.launch(command)
            if self.launches == 0:
                os.kill(child.pid, signal.SIGKILL)
            self.launches += 1
            return child

    killing = Killing()

    async def run() -> ProbeScores:
        log = tmp_path / "fresh.log"
        return await probe_fresh(
            killing, rig.model, PREFIXES[:2], work_dir=rig.folder, log_path=log, waits=rig.waits, max_model_len=512
        )

    assert len(rig.run(run()).scores) == 2
    assert killing.launches == 2


def test_a_fresh_engine_that_cannot_load_shows_its_log(rig: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match=r"(?s)the fresh engine for .* ended with code 1"):
        rig.run(fresh(rig, tmp_path))
    assert not list(rig.folder.glob("probe-*"))
