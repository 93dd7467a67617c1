"""Weights changed in a live engine: exact, between steps, all or nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rose.errors import ContractError, EngineError, TransferError
from rose.records import Finish, VersionSpan
from rose_executor.fresh_probe import ProbeScores, compare, probe_fresh, probe_live
from rose_executor.launcher import Command
from rose_transfer.snapshot import MANIFEST, WEIGHTS, Snapshot, publish

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


def updated(masters: Weights, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in masters.items()}


async def fresh(rig: Any, snapshot: Snapshot | Path, prefixes: Sequence[Sequence[int]] = PREFIXES) -> ProbeScores:
    return await probe_fresh(
        rig.warm,
        snapshot if isinstance(snapshot, Path) else snapshot.path,
        prefixes,
        work_dir=rig.folder,
        log_path=rig.folder / "probe.log",
        waits=rig.waits,
        max_model_len=512,
    )


async def change(rig: Any, snapshot: Snapshot) -> Any:
    await rig.engine.control.stage(snapshot.version, snapshot.path)
    return await rig.engine.control.commit(snapshot.version)


def test_after_each_update_the_live_engine_is_a_fresh_one(fresh_rig: Any, masters: Weights, tmp_path: Path) -> None:
    rig = fresh_rig

    async def run() -> None:
        before = await probe_live(rig.route(), PREFIXES, request_prefix="v0")
        assert compare(before, await fresh(rig, rig.model)) <= PARITY_MAX
        for version in (1, 2):
            snapshot = publish(tmp_path, version, updated(masters, version), rig.model)
            committed = await change(rig, snapshot)
            assert committed.pause_ms >= committed.load_ms > 0
            described = await rig.engine.control.describe()
            assert (described.weight_version, described.paused, described.poisoned) == (version, False, "")
            assert rig.engine.page.version == version
            after = await probe_live(rig.route(), PREFIXES, request_prefix=f"v{version}")
            assert compare(after, await fresh(rig, snapshot)) <= PARITY_MAX
            assert _differs(after, before)
            before = after

    rig.run(run())


def _differs(one: ProbeScores, other: ProbeScores) -> bool:
    try:
        return compare(one, other) > 100 * PARITY_MAX
    except ContractError:
        return True


def test_an_update_in_mid_stream_is_stamped_and_exact(fresh_rig: Any, masters: Weights, tmp_path: Path) -> None:
    """Eight greedy streams; each goes on exactly as a fresh engine would from the token where it changed."""
    rig = fresh_rig

    async def run() -> None:
        snapshot = publish(tmp_path, 1, updated(masters, 1), rig.model)
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
        await change(rig, snapshot)
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
        assert compare(ProbeScores(tuple(live)), await fresh(rig, snapshot, prefixes)) <= PARITY_MAX

    rig.run(run())


def _flip(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-3] ^= 4
    (folder / WEIGHTS).write_bytes(data)


def _truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8])


def _other_version(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["version"] = 9
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_flip, "do not match their checksum"),
        (_truncate, "not a whole safetensors file"),
        (_other_version, "holds version 9"),
        (lambda folder: (folder / WEIGHTS).unlink(), "not a whole safetensors file"),
        (lambda folder: (folder / MANIFEST).unlink(), "not a published version"),
    ],
)
def test_a_spoiled_version_is_refused_and_the_old_one_serves(
    rig: Any, masters: Weights, tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    snapshot = publish(tmp_path, 4, updated(masters, 4), rig.model)
    spoil(snapshot.path)
    refused(rig, snapshot, why)


@pytest.mark.parametrize(
    ("reshape", "why"),
    [
        (lambda w: {n: t for n, t in w.items() if n != "model.norm.weight"}, r"model\.norm\.weight: None"),
        (lambda w: {**w, "model.extra.weight": torch.ones(2)}, r"model\.extra\.weight: \(2,\)"),
        (lambda w: {**w, "model.norm.weight": torch.ones(32)}, r"model\.norm\.weight: \(32,\)"),
    ],
)
def test_a_whole_version_of_another_model_is_refused(
    rig: Any, masters: Weights, tmp_path: Path, reshape: Callable[[Weights], Weights], why: str
) -> None:
    from safetensors.torch import save_file

    other = reshape(updated(masters, 4))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in other.items()}, base / WEIGHTS)
    refused(rig, publish(tmp_path / "versions", 4, other, base), why)


def refused(rig: Any, snapshot: Snapshot, why: str) -> None:
    async def run() -> None:
        before = await probe_live(rig.route(), PREFIXES, request_prefix=f"before-{snapshot.path}")
        with pytest.raises(TransferError, match=why):
            await rig.engine.control.stage(snapshot.version, snapshot.path)
        with pytest.raises(EngineError, match="not staged"):
            await rig.engine.control.commit(snapshot.version)
        described = await rig.engine.control.describe()
        assert (described.weight_version, described.paused, described.poisoned) == (0, False, "")
        after = await probe_live(rig.route(), PREFIXES, request_prefix=f"after-{snapshot.path}")
        assert compare(before, after) <= PARITY_MAX

    rig.run(run())


def test_only_the_staged_version_can_be_committed(rig: Any, masters: Weights, tmp_path: Path) -> None:
    async def run() -> None:
        snapshot = publish(tmp_path, 4, updated(masters, 4), rig.model)
        staged = await rig.engine.control.stage(4, snapshot.path)
        assert staged.bytes == sum(2 * tensor.numel() for tensor in masters.values())
        with pytest.raises(EngineError, match="version 5 is not staged"):
            await rig.engine.control.commit(5)
        assert (await rig.engine.control.describe()).weight_version == 0

    rig.run(run())


def test_packed_weights_are_refused_instead_of_half_updated(rig: Any, masters: Weights, tmp_path: Path) -> None:
    """With vLLM's own packing an update in place would miss a tied head without any error."""

    async def run() -> None:
        engine = rig.new_engine("engine-packed", unpacked_weights=False)
        await engine.start(0)
        try:
            snapshot = publish(tmp_path, 1, updated(masters, 1), rig.model)
            with pytest.raises(TransferError, match="is packed and cannot be replaced in place"):
                await engine.control.stage(1, snapshot.path)
            assert (await engine.control.describe()).weight_version == 0
        finally:
            await engine.stop()
            engine.page.discard()

    rig.run(run())


def test_an_engine_starts_from_a_published_version(rig: Any, masters: Weights, tmp_path: Path) -> None:
    async def run() -> None:
        snapshot = publish(tmp_path, 3, updated(masters, 3), rig.model)
        engine = rig.new_engine("engine-three")
        await engine.start(3, snapshot.path)
        try:
            from rose_executor.token_route import TokenRoute

            route = TokenRoute(engine.base_url, rig.session, page=engine.page)
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
