"""A user of vLLM's own interface for weight updates pulls versions from a ROSE publisher into a real engine."""

from __future__ import annotations

import asyncio
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.errors import ContractError
from rose.waits import WaitBoard
from rose_executor.engine_env import IMPORT_ENV
from rose_executor.fresh_probe import TOP_LOGPROBS, ProbeScores, compare, probe_fresh
from rose_executor.launcher import Command
from rose_executor.warm_process import WarmProcess
from rose_transfer.distribution import WeightPublisher
from rose_transfer.transport.tcp import TcpServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

HELPERS = Path(__file__).parent
PARITY_MAX = 1e-4
PREFIXES = [[(3 + 7 * i + 5 * j) % 90 for j in range(10 + 9 * i)] for i in range(4)]
TOKEN = "0123456789abcdef" * 2
WEIGHTS = "model.safetensors"


def moved(weights: dict[str, torch.Tensor], seed: int, share: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(value.shape, generator=generator) < share, value * 1.5, value)
        for name, value in weights.items()
    }


def as_model(folder: Path, model: Path, weights: dict[str, torch.Tensor]) -> Path:
    """A folder with the model of another one and these weights."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != WEIGHTS:
            (folder / file.name).symlink_to(file)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder


class Story:
    """What an engine did and said, and what fresh engines of the same weights say."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.fresh: dict[int, ProbeScores] = {}
        self.dense_bytes = 0

    def difference(self, at: int, version: int) -> float:
        """Between what the engine said after deed `at` and what a fresh engine of `version` says."""
        says = tuple({int(token): value for token, value in probe.items()} for probe in self.answers[at]["says"])
        try:
            return compare(ProbeScores(says), self.fresh[version])
        except ContractError:  # mostly other tokens
            return math.inf


async def tell(folder: Path, model: Path) -> Story:
    story = Story()
    waits = WaitBoard()
    first = load_file(model / WEIGHTS)
    weights = {0: first, 1: moved(first, 1, 0.5), 2: moved(moved(first, 1, 0.5), 2, 0.02)}
    folders = {version: as_model(folder / f"model-{version}", model, held) for version, held in weights.items()}
    (folder / "token").write_text(TOKEN)
    (folder / "other-token").write_text(TOKEN[::-1])
    warm = await WarmProcess.start(waits, log_path=folder / "warm.log", env={**IMPORT_ENV, "PYTHONPATH": str(HELPERS)})
    try:
        await live(story, warm, folder, folders[0], weights)
        for version, model_dir in folders.items():
            story.fresh[version] = await probe_fresh(
                warm,
                model_dir,
                PREFIXES,
                work_dir=folder,
                log_path=folder / "fresh.log",
                waits=waits,
                max_model_len=512,
            )
    finally:
        await warm.close()
    return story


async def live(story: Story, warm: WarmProcess, folder: Path, model: Path, weights: dict[int, Any]) -> None:
    """Publish the versions and let an engine of `model` do all that is asked of it."""
    waits = WaitBoard()
    serve = partial(TcpServer, token=TOKEN, waits=waits)
    async with WeightPublisher(folder / "store", waits=waits, serve=[serve]) as publisher:
        story.dense_bytes = (await publisher.publish(1, weights[1])).dense_bytes
        await publisher.publish(2, weights[2])
        info = {
            "address": f"127.0.0.1:{publisher.servers[0].port}",
            "token_file": str(folder / "token"),
            "folder": str(folder / "fetched"),
        }
        deeds = [
            ("update", {"version": 1}),
            ("init", {**info, "address": "nowhere"}),
            ("init", {**info, "color": "red"}),
            ("init", info),
            ("update", {"version": 9}),
            ("update", {"version": 1}),
            ("update", {"version": 2}),
            ("give up", {"version": 1}),
            ("update", {"version": 1}),
            ("init", {**info, "token_file": str(folder / "other-token")}),
            ("update", {"version": 2}),
            ("init", {**info, "address": "127.0.0.1:9"}),
            ("update", {"version": 2, "timeout_s": 0.5}),
            ("init", info),
            ("update", {"version": 2}),
        ]
        task = {"model": str(model), "prefixes": PREFIXES, "top_logprobs": TOP_LOGPROBS, "deeds": deeds}
        (folder / "task.json").write_text(json.dumps(task))
        arguments = (str(folder / "task.json"), str(folder / "answers.json"))
        child = await warm.launch(Command("transfer_backend_main", arguments, folder / "engine.log", folder))
        assert await asyncio.wait_for(child.wait(), 240) == 0, (folder / "engine.log").read_text()[-4000:]
    story.answers = json.loads((folder / "answers.json").read_text())


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Story:
    return asyncio.run(tell(tmp_path_factory.mktemp("backend"), tiny_model))


NOT_INITIALISED, NO_ADDRESS, NO_FIELD, _INIT, NOT_KEPT, TO_1, TO_2, GIVEN_UP, BACK_TO_1 = range(9)
WRONG_TOKEN, UNREACHABLE, TO_2_AGAIN = 10, 12, 14


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (NOT_INITIALISED, "nothing says where weights come from"),
        (NO_ADDRESS, "'nowhere' is no address"),
        (NO_FIELD, "color"),
        (NOT_KEPT, "version 9 is not kept upstream"),
    ],
)
def test_what_cannot_be_is_told_and_the_engine_goes_on_with_what_it_has(story: Story, at: int, message: str) -> None:
    assert message in story.answers[at]["error"]
    assert story.difference(at, 0) < PARITY_MAX
    assert story.answers[at]["held"] is None


@pytest.mark.parametrize(
    ("at", "message"), [(WRONG_TOKEN, "token"), (UNREACHABLE, "127.0.0.1:9")], ids=["token", "address"]
)
def test_a_server_that_is_not_there_or_refuses_leaves_the_version_in_force(story: Story, at: int, message: str) -> None:
    assert message in story.answers[at]["error"]
    assert story.difference(at, 1) < PARITY_MAX
    assert (story.answers[at]["held"], story.answers[at]["version"]) == (1, "1")


@pytest.mark.parametrize(("at", "version"), [(TO_1, 1), (TO_2, 2), (BACK_TO_1, 1), (TO_2_AGAIN, 2)])
def test_after_an_update_the_engine_is_one_that_was_started_from_the_version(
    story: Story, at: int, version: int
) -> None:
    answer = story.answers[at]
    assert answer["error"] == ""
    assert story.difference(at, version) < PARITY_MAX
    assert story.difference(at, 3 - version) > 10 * PARITY_MAX
    assert (answer["held"], answer["version"]) == (version, str(version))


def test_only_the_first_update_brings_the_whole_model(story: Story) -> None:
    assert story.answers[TO_1]["received_bytes"] > story.dense_bytes / 4
    for at in (TO_2, GIVEN_UP, TO_2_AGAIN):
        assert 0 < story.answers[at]["received_bytes"] < story.dense_bytes / 10


def test_an_update_that_is_given_up_changes_nothing_and_is_not_fetched_again(story: Story) -> None:
    assert story.answers[GIVEN_UP]["error"] == ""
    assert story.answers[BACK_TO_1]["received_bytes"] == 0
    assert story.difference(GIVEN_UP, 2) < PARITY_MAX
    assert story.answers[GIVEN_UP]["held"] == 2
