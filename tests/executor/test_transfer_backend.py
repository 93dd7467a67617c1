"""A user of vLLM's own interface for weight updates pulls versions from a ROSE publisher into a real engine."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
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
from rose_transfer.layout.layout_json import from_json
from rose_transfer.store.roles import Role, hold_alone
from rose_transfer.transport.tcp import TcpServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

HELPERS = Path(__file__).parent
PARITY_MAX = 1e-4
PREFIXES = [[(3 + 7 * i + 5 * j) % 90 for j in range(10 + 9 * i)] for i in range(4)]
TOKEN = "0123456789abcdef" * 2
WEIGHTS = "model.safetensors"
PLACE = "replica-0-stage-0-rank-0"


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


@dataclass
class Story:
    """What engines of one and of two workers did and said, and what fresh engines of the same weights say."""

    dense_bytes: int = 0
    answers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    fresh: dict[int, ProbeScores] = field(default_factory=dict)

    def difference(self, workers: int, at: int, version: int) -> float:
        """Between what an engine said after deed `at` and what a fresh engine of `version` says."""
        said = self.answers[workers][at]["says"]
        says = tuple({int(token): value for token, value in probe.items()} for probe in said)
        try:
            return compare(ProbeScores(says), self.fresh[version])
        except ContractError:  # mostly other tokens
            return math.inf

    def held(self, workers: int, at: int) -> set[int | None]:
        return {worker["held"] for worker in self.answers[workers][at]["workers"]}

    def received_bytes(self, workers: int, at: int) -> list[int]:
        return [worker["received_bytes"] for worker in self.answers[workers][at]["workers"]]


async def tell(folder: Path, model: Path) -> Story:
    story = Story()
    waits = WaitBoard()
    first = load_file(model / WEIGHTS)
    weights = {0: first, 1: moved(first, 1, 0.5), 2: moved(moved(first, 1, 0.5), 2, 0.02)}
    folders = {version: as_model(folder / f"model-{version}", model, held) for version, held in weights.items()}
    (folder / "token").write_text(TOKEN)
    (folder / "other-token").write_text(TOKEN[::-1])
    path = os.pathsep.join([str(HELPERS), *sys.path])
    env = {**IMPORT_ENV, "PYTHONPATH": path, "TMPDIR": str(folder)}
    warm = await WarmProcess.start(waits, log_path=folder / "warm.log", env=env)
    try:
        traced = await run(warm, folder, "trace", {"model": str(folders[0]), "trace": [1, 2]})
        layouts = [from_json(text) for text in traced]
        serve = partial(TcpServer, token=TOKEN, waits=waits)
        publisher_in = partial(WeightPublisher, waits=waits, receivers=layouts, serve=[serve])
        async with publisher_in(folder / "store") as publisher, publisher_in(folder / "other-store") as other:
            story.dense_bytes = (await publisher.publish(1, weights[1])).dense_bytes
            await publisher.publish(2, weights[2])
            await other.publish(1, moved(first, 3, 0.5))
            for workers in (1, 2):
                task = {
                    "model": str(folders[0]),
                    "workers": workers,
                    "prefixes": PREFIXES,
                    "top_logprobs": TOP_LOGPROBS,
                    "deeds": deeds(folder, f"{workers}", publisher.servers[0].port)
                    + (deeds_of_two(folder, publisher.servers[0].port, other.servers[0].port) if workers == 2 else [])
                    + moves(),
                }
                taken = folder / f"{workers}-taken" / PLACE
                lock = hold_alone(taken, Role.ENGINE)
                story.answers[workers] = await run(warm, folder, f"live-{workers}", task)
                os.close(lock)
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


async def run(warm: WarmProcess, folder: Path, name: str, task: dict[str, Any]) -> Any:
    """What a child of the warm process answers to a task."""
    asked, answers, log = (folder / f"{name}{end}" for end in (".json", ".answers.json", ".log"))
    asked.write_text(json.dumps(task))
    child = await warm.launch(Command("transfer_backend_main", (str(asked), str(answers)), log, folder))
    assert await asyncio.wait_for(child.wait(), 200) == 0, log.read_text()[-4000:]
    return json.loads(answers.read_text())


def deeds(folder: Path, name: str, port: int) -> list[tuple[str, dict[str, Any]]]:
    info = {"address": f"127.0.0.1:{port}", "token_file": str(folder / "token"), "folder": str(folder / name)}
    return [
        ("update", {"version": 1}),
        ("init", {**info, "address": "nowhere"}),
        ("init", {**info, "color": "red"}),
        ("init", info),
        ("update", {"version": 9}),
        ("stumble", {"version": 1}),
        ("finish", {"version": 1}),
        ("update", {"version": 2}),
        ("give up", {"version": 1}),
        ("update", {"version": 1}),
        ("init", {**info, "token_file": str(folder / "other-token")}),
        ("update", {"version": 2}),
        ("init", {**info, "address": "127.0.0.1:9"}),
        ("update", {"version": 2, "timeout_s": 0.5}),
        ("init", info),
        ("update", {"version": 2}),
        ("stumble", {"version": 1}),
        ("finish", {"version": 1}),
        ("init", {**info, "folder": str(folder / f"{name}-taken")}),
        ("update", {"version": 2}),
        ("tamper", {"by": 1.0}),
        ("update", {"version": 2}),
        ("tamper", {"by": 0.3}),  # no bfloat16 any more, which is what was published
        ("update", {"version": 1}),
        ("reload", {}),
        ("update", {"version": 1}),
        ("reload", {}),
        ("update", {"version": 2}),
        ("update", {"version": 2}),
        ("fall", {"version": 1}),
        ("finish", {"version": 1}),
        ("update", {"version": 2}),
        ("finish with nothing", {"label": "1"}),
        ("label", {"label": "1"}),
        ("label", {"label": "2"}),
        ("update without a label", {"version": 1}),
        ("reload", {}),
        ("finish with nothing", {"label": "2"}),
        ("update", {"version": 2}),
        ("break", {"version": 1}),
        ("update on", {"version": 1}),
        ("update", {"version": 2}),
        ("tamper", {"by": 0.3}),
        ("break", {"version": 1}),
        ("start", {}),
        ("finish", {"version": 1}),
        ("stage", {"version": 2}),
        ("reload", {}),
        ("finish", {"version": 2}),
        ("update on", {"version": 2}),
        ("update", {"version": "1"}),
        ("update", {"version": 1, "timeout_s": math.nan}),
        ("init", {**info, "token_file": 5}),
        ("remove", {"folder": info["folder"]}),
        ("update", {"version": 2}),
        ("take", {"folder": f"{info['folder']}/{PLACE}"}),
    ]


def deeds_of_two(folder: Path, port: int, other_port: int) -> list[tuple[str, dict[str, Any]]]:
    """Where the two workers of an engine are told, or brought, different things."""
    info = {"address": f"127.0.0.1:{port}", "token_file": str(folder / "token"), "folder": str(folder / "2")}
    return [
        ("update each", {"infos": [{"version": 1}, {"version": 2}]}),
        ("update each", {"infos": [{"version": 2}, {"version": 1}]}),
        ("update each", {"infos": [{"version": 1}, {"color": "red"}]}),
        ("update each", {"infos": [{"version": 1}]}),
        ("turn away", {"address": f"127.0.0.1:{other_port}"}),
        ("update", {"version": 1}),
        ("init", info),
        ("update", {"version": 1}),
    ]


def moves() -> list[tuple[str, dict[str, Any]]]:
    """Where the weights of a worker are given other memory; the last deeds of all."""
    return [
        ("update", {"version": 1}),
        ("move", {"by": 0.0}),
        ("update", {"version": 1}),
        ("update", {"version": 2}),
        ("move", {"by": 1.0}),
        ("update", {"version": 1}),
        ("move while staged", {"version": 2}),
        ("update on", {"version": 2}),
        ("move while staged", {"version": 2}),
        ("update on", {"version": 2}),
    ]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Story:
    return asyncio.run(tell(tmp_path_factory.mktemp("backend"), tiny_model))


NOT_INITIALISED, NO_ADDRESS, NO_FIELD, _INIT, NOT_KEPT, STUMBLED_ANEW, TO_1, TO_2, GIVEN_UP, BACK_TO_1 = range(10)
WRONG_TOKEN, UNREACHABLE, TO_2_AGAIN, STUMBLED, FINISHED, FOLDER_TAKEN, TO_2_AT_LAST = 11, 13, 15, 16, 17, 18, 19
TAMPERED, MENDED_TO_2, TAMPERED_AGAIN, MENDED_TO_1, RELOADED, AGAIN_TO_1, RELOADED_AGAIN, AGAIN_TO_2 = range(20, 28)
NOTHING_TO_DO, FALLEN, STOOD_UP, _TO_2 = range(28, 32)
FINISHED_NOTHING, LABELLED_WRONG, LABELLED_RIGHT, TO_1_UNNAMED, NAMELESS, LABELLED_ANEW, _TO_2_NAMED = range(32, 39)
BROKEN, HEALED, _HEALED_TO_2 = range(39, 42)
_TAMPERED_ONCE_MORE, BROKEN_ANEW, STARTED_MIXED, FINISHED_MIXED, _TO_2_STAGED, _RELOADED, OVERTAKEN = range(42, 49)
TO_2_ON, TEXT_FOR_NUMBER, NO_TIME, NO_PATH, _REMOVED, HELD_AGAIN, NOT_TO_BE_TAKEN = range(49, 56)
OTHERS_VERSION, NOTHING_OR_SOMETHING, NO_INFORMATION, TOO_FEW = range(56, 60)
OTHERS_TRAINING, TO_1_TOGETHER = 61, 63
_TO_1_BEFORE, MOVED, STILL_1, MOVED_TO_2, MOVED_AND_CHANGED, CHANGED_TO_1 = range(-10, -4)
MOVED_WHILE_STAGED, FOUND_AT_2, MOVED_WHILE_IN_FORCE, AGAIN_AT_2 = range(-4, 0)


one_or_two_workers = pytest.mark.parametrize("workers", [1, 2], ids=["one worker", "two workers"])


@one_or_two_workers
@pytest.mark.parametrize(
    ("at", "message"),
    [
        (NOT_INITIALISED, "nothing says where weights come from"),
        (NO_ADDRESS, "'nowhere' is no address"),
        (NO_FIELD, "color"),
        (NOT_KEPT, "version 9 is not kept upstream"),
    ],
)
def test_what_cannot_be_is_told_and_the_engine_goes_on_with_what_it_has(
    story: Story, workers: int, at: int, message: str
) -> None:
    assert message in story.answers[workers][at]["error"]
    assert story.difference(workers, at, 0) < PARITY_MAX
    assert story.held(workers, at) == {None}


@one_or_two_workers
@pytest.mark.parametrize(
    ("at", "message"), [(WRONG_TOKEN, "token"), (UNREACHABLE, "127.0.0.1:9")], ids=["token", "address"]
)
def test_a_server_that_is_not_there_or_refuses_leaves_the_version_in_force(
    story: Story, workers: int, at: int, message: str
) -> None:
    assert message in story.answers[workers][at]["error"]
    assert story.difference(workers, at, 1) < PARITY_MAX
    assert (story.held(workers, at), story.answers[workers][at]["version"]) == ({1}, "1")


@one_or_two_workers
@pytest.mark.parametrize(("at", "version"), [(TO_1, 1), (TO_2, 2), (BACK_TO_1, 1), (TO_2_AGAIN, 2)])
def test_after_an_update_the_engine_is_one_that_was_started_from_the_version(
    story: Story, workers: int, at: int, version: int
) -> None:
    answer = story.answers[workers][at]
    assert answer["error"] == ""
    assert story.difference(workers, at, version) < PARITY_MAX
    assert story.difference(workers, at, 3 - version) > 10 * PARITY_MAX
    assert (story.held(workers, at), answer["version"]) == ({version}, str(version))


@one_or_two_workers
def test_only_the_first_update_brings_the_whole_model(story: Story, workers: int) -> None:
    first = story.received_bytes(workers, TO_1)
    assert sum(first) > story.dense_bytes / 4
    for at in (TO_2, GIVEN_UP, TO_2_AGAIN):
        for received, whole in zip(story.received_bytes(workers, at), first, strict=True):
            assert 0 < received < whole / 4


def test_a_worker_of_two_fetches_its_own_part(story: Story) -> None:
    (whole,) = story.received_bytes(1, TO_1)
    assert all(received < 0.75 * whole for received in story.received_bytes(2, TO_1))


@one_or_two_workers
def test_an_update_that_is_given_up_changes_nothing_and_is_not_fetched_again(story: Story, workers: int) -> None:
    assert story.answers[workers][GIVEN_UP]["error"] == ""
    assert set(story.received_bytes(workers, BACK_TO_1)) == {0}
    assert story.difference(workers, GIVEN_UP, 2) < PARITY_MAX
    assert story.held(workers, GIVEN_UP) == {2}


@one_or_two_workers
def test_a_worker_that_fails_to_commit_leaves_all_at_the_old_version_until_it_succeeds(
    story: Story, workers: int
) -> None:
    stumbled, finished = (story.answers[workers][at] for at in (STUMBLED, FINISHED))
    assert "this worker stumbled" in stumbled["error"]
    assert story.difference(workers, STUMBLED, 2) < PARITY_MAX
    assert (story.held(workers, STUMBLED), stumbled["version"]) == ({2}, "2")
    assert finished["error"] == ""
    assert story.difference(workers, FINISHED, 1) < PARITY_MAX
    assert (story.held(workers, FINISHED), finished["version"]) == ({1}, "1")


@one_or_two_workers
def test_of_a_worker_that_left_nobody_knows_what_nobody_says_that_it_holds_a_version(
    story: Story, workers: int
) -> None:
    assert "this worker stumbled" in story.answers[workers][FALLEN]["error"]
    assert [one["held"] for one in story.answers[workers][FALLEN]["workers"]] == [2] * (workers - 1) + [None]
    assert story.answers[workers][STOOD_UP]["error"] == ""
    assert story.held(workers, STOOD_UP) == {1}
    assert story.difference(workers, STOOD_UP, 1) < PARITY_MAX


@one_or_two_workers
def test_an_engine_whose_weights_may_be_mixed_takes_no_request_until_an_update_succeeds(
    story: Story, workers: int
) -> None:
    assert story.answers[workers][FALLEN]["says"] == []
    assert story.answers[workers][FALLEN]["version"] == "unknown"
    assert len(story.answers[workers][STOOD_UP]["says"]) == len(PREFIXES)


@one_or_two_workers
def test_mixed_weights_generate_nothing_and_are_healed_by_another_update(story: Story, workers: int) -> None:
    broken, healed = (story.answers[workers][at] for at in (BROKEN, HEALED))
    assert "this worker stumbled" in broken["error"]
    assert (broken["says"], broken["version"]) == ([], "unknown")
    assert (healed["error"], healed["version"], story.held(workers, HEALED)) == ("", "1", {1})
    assert story.difference(workers, HEALED, 1) < PARITY_MAX


@one_or_two_workers
def test_an_update_that_left_weights_mixed_is_finished_by_finishing_it_again(story: Story, workers: int) -> None:
    """A bucket that was none of the published form was overwritten, and all others were changed in steps."""
    broken, started, finished = (story.answers[workers][at] for at in (BROKEN_ANEW, STARTED_MIXED, FINISHED_MIXED))
    assert "call finish_weight_update again; if that cannot go on, update_weights and then" in broken["error"]
    assert (broken["says"], broken["version"]) == ([], "unknown")
    assert "Call finish_weight_update first" in started["error"]
    assert (finished["error"], finished["version"], story.held(workers, FINISHED_MIXED)) == ("", "1", {1})
    assert story.difference(workers, FINISHED_MIXED, 1) < PARITY_MAX


@one_or_two_workers
def test_what_was_staged_before_a_reload_is_refused_and_the_way_out_works(story: Story, workers: int) -> None:
    overtaken, mended = (story.answers[workers][at] for at in (OVERTAKEN, TO_2_ON))
    assert "vLLM has loaded weights since the update was staged; update_weights again, then fin" in overtaken["error"]
    assert story.difference(workers, OVERTAKEN, 0) < PARITY_MAX
    assert (mended["error"], mended["version"], story.held(workers, TO_2_ON)) == ("", "2", {2})
    assert story.difference(workers, TO_2_ON, 2) < PARITY_MAX


@one_or_two_workers
@pytest.mark.parametrize(
    ("at", "message"),
    [
        (TEXT_FOR_NUMBER, "'1' is no number of a version; expected an integer"),
        (NO_TIME, "timeout_s=nan is no time to fetch in; expected seconds"),
        (NO_PATH, "token_file=5 is no path; expected a path, as text"),
    ],
)
def test_information_of_another_kind_is_refused_in_words(story: Story, workers: int, at: int, message: str) -> None:
    answer = story.answers[workers][at]
    assert message in answer["error"]
    assert (story.held(workers, at), answer["version"]) == ({2}, "2")
    assert story.difference(workers, at, 2) < PARITY_MAX


@one_or_two_workers
def test_a_folder_that_was_removed_is_made_and_held_anew(story: Story, workers: int) -> None:
    assert story.answers[workers][HELD_AGAIN]["error"] == ""
    assert "process has its weights come to" in story.answers[workers][NOT_TO_BE_TAKEN]["error"]


@one_or_two_workers
@pytest.mark.parametrize("at", [FINISHED_NOTHING, LABELLED_WRONG])
def test_a_label_that_the_weights_are_not_is_refused(story: Story, workers: int, at: int) -> None:
    answer = story.answers[workers][at]
    assert "the weights are not '1': they are labelled '2'" in answer["error"]
    assert (story.held(workers, at), answer["version"]) == ({2}, "2")
    assert story.difference(workers, at, 2) < PARITY_MAX


@one_or_two_workers
def test_weights_are_labelled_by_what_they_are_whether_they_are_named_or_not(story: Story, workers: int) -> None:
    told = story.answers[workers]
    assert (told[LABELLED_RIGHT]["error"], told[LABELLED_RIGHT]["version"]) == ("", "2")
    assert (told[TO_1_UNNAMED]["error"], told[TO_1_UNNAMED]["version"]) == ("", "1")
    assert story.difference(workers, TO_1_UNNAMED, 1) < PARITY_MAX
    assert (told[NAMELESS]["error"], told[NAMELESS]["version"]) == ("", "unknown")
    assert story.held(workers, NAMELESS) == {None}
    assert "they are labelled 'unknown'" in told[LABELLED_ANEW]["error"]
    assert (told[_TO_2_NAMED]["error"], told[_TO_2_NAMED]["version"]) == ("", "2")


@one_or_two_workers
def test_a_first_update_that_fails_at_one_worker_leaves_what_was_loaded(story: Story, workers: int) -> None:
    """`TO_1` is the same update, finished."""
    assert "this worker stumbled" in story.answers[workers][STUMBLED_ANEW]["error"]
    assert story.difference(workers, STUMBLED_ANEW, 0) < PARITY_MAX
    assert story.held(workers, STUMBLED_ANEW) == {None}


@one_or_two_workers
def test_the_folder_of_another_engine_is_refused_and_the_one_before_stays(story: Story, workers: int) -> None:
    error = story.answers[workers][FOLDER_TAKEN]["error"]
    assert "another process has its weights come to" in error
    assert f"process {os.getpid()}" in error
    told = story.answers[workers]
    assert [one["folder"] for one in told[FOLDER_TAKEN]["workers"]] == [one["folder"] for one in told[_INIT]["workers"]]
    assert story.held(workers, TO_2_AT_LAST) == {2}
    assert story.difference(workers, TO_2_AT_LAST, 2) < PARITY_MAX


@one_or_two_workers
@pytest.mark.parametrize(
    ("before", "at", "version"),
    [
        (TAMPERED, MENDED_TO_2, 2),
        (TAMPERED_AGAIN, MENDED_TO_1, 1),
        (RELOADED, AGAIN_TO_1, 1),
        (RELOADED_AGAIN, AGAIN_TO_2, 2),
    ],
    ids=["changed, the same", "changed, another", "reloaded, the same", "reloaded, another"],
)
def test_an_engine_whose_memory_was_changed_by_others_is_brought_to_the_version_that_is_asked_for(
    story: Story, workers: int, before: int, at: int, version: int
) -> None:
    answer = story.answers[workers][at]
    assert story.difference(workers, before, version) > 10 * PARITY_MAX
    assert answer["error"] == ""
    assert story.difference(workers, at, version) < PARITY_MAX
    assert (story.held(workers, at), answer["version"]) == ({version}, str(version))


@one_or_two_workers
def test_an_update_reaches_weights_that_were_given_other_memory(story: Story, workers: int) -> None:
    assert story.difference(workers, MOVED, 1) < PARITY_MAX
    assert story.difference(workers, MOVED_AND_CHANGED, 2) > 10 * PARITY_MAX
    for at, version in ((STILL_1, 1), (MOVED_TO_2, 2), (CHANGED_TO_1, 1)):
        answer = story.answers[workers][at]
        assert (answer["error"], answer["version"], story.held(workers, at)) == ("", str(version), {version})
        assert story.difference(workers, at, version) < PARITY_MAX
    assert set(story.received_bytes(workers, STILL_1)) == {0}, "the same weights, elsewhere"


@one_or_two_workers
@pytest.mark.parametrize(
    ("at", "then"),
    [(MOVED_WHILE_STAGED, FOUND_AT_2), (MOVED_WHILE_IN_FORCE, AGAIN_AT_2)],
    ids=["another version", "the version in force"],
)
def test_weights_that_move_while_an_update_is_staged_generate_nothing_until_another_one(
    story: Story, workers: int, at: int, then: int
) -> None:
    moved_away, found = story.answers[workers][at], story.answers[workers][then]
    assert "has been given other memory, and nobody knows what it holds" in moved_away["error"]
    assert (moved_away["says"], moved_away["version"]) == ([], "unknown")
    assert (found["error"], found["version"], story.held(workers, then)) == ("", "2", {2})
    assert story.difference(workers, then, 2) < PARITY_MAX


@one_or_two_workers
def test_an_update_to_the_version_in_force_receives_nothing(story: Story, workers: int) -> None:
    assert story.answers[workers][NOTHING_TO_DO]["error"] == ""
    assert set(story.received_bytes(workers, NOTHING_TO_DO)) == {0}
    assert story.difference(workers, NOTHING_TO_DO, 2) < PARITY_MAX


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (OTHERS_VERSION, r"were brought different weights: version 1 \([0-9a-f]{16}…\) and version 2 \("),
        (NOTHING_OR_SOMETHING, r"were brought different weights: version 1 \([0-9a-f]{16}…\) and version 2 \("),
        (NO_INFORMATION, "color"),
        (TOO_FEW, "'version'"),
        (OTHERS_TRAINING, r"were brought different weights: version 1 \([0-9a-f]{16}…\) and version 1 \("),
    ],
)
def test_workers_that_are_brought_different_weights_refuse_them_all(story: Story, at: int, message: str) -> None:
    assert re.search(message, story.answers[2][at]["error"])
    assert story.held(2, at) == {2}
    assert story.answers[2][at]["version"] == "2"
    assert story.difference(2, at, 2) < PARITY_MAX


def test_after_workers_disagreed_the_next_update_works(story: Story) -> None:
    assert story.answers[2][TO_1_TOGETHER]["error"] == ""
    assert story.held(2, TO_1_TOGETHER) == {1}
    assert story.difference(2, TO_1_TOGETHER, 1) < PARITY_MAX
