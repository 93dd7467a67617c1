"""What counts as equal: the largest difference over the ids that both sides name. A lost fresh engine is repeated."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rose.errors import ClusterError, ContractError, EngineError, RoseError
from rose.waits import WaitBoard
from rose_executor import fresh_probe
from rose_executor.fresh_probe import ProbeScores, compare, probe_fresh
from rose_executor.launcher import Command, LauncherDied

TEN = {token: -0.1 * token for token in range(10)}


def test_the_largest_difference_anywhere_counts() -> None:
    live = ProbeScores((TEN, TEN))
    assert compare(live, live) == 0
    assert compare(live, ProbeScores((TEN, {**TEN, 4: -0.9}))) == pytest.approx(0.5)


def test_a_tie_at_the_edge_of_the_list_is_no_difference() -> None:
    other = {token: value for token, value in TEN.items() if token != 9} | {11: -0.9}
    assert compare(ProbeScores((TEN,)), ProbeScores((other,))) == 0


def test_mostly_different_ids_are_another_distribution() -> None:
    other = {token + 3: value for token, value in TEN.items()}
    with pytest.raises(ContractError, match="7 of 10 likely tokens"):
        compare(ProbeScores((TEN,)), ProbeScores((other,)))
    with pytest.raises(ContractError, match="0 of 0"):
        compare(ProbeScores(({},)), ProbeScores(({},)))


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_not_a_number_differs_from_everything(order: int) -> None:
    broken = {**TEN, 4: math.nan}
    assert compare(*(ProbeScores((TEN, TEN)), ProbeScores((broken, TEN)))[::order]) == math.inf


def test_other_questions_cannot_be_compared() -> None:
    with pytest.raises(ContractError, match="2 live probes against 1"):
        compare(ProbeScores((TEN, TEN)), ProbeScores((TEN,)))


@dataclass
class Ended:
    """A child that has ended with `exit_code` already."""

    exit_code: int
    pid: int = 1

    def death(self) -> str:
        return f"ended with code {self.exit_code}"

    async def wait(self) -> int:
        return self.exit_code

    def signal(self, signum: signal.Signals) -> None:
        pass


@dataclass
class ScriptedLauncher:
    """Each launch goes as the script says: an exit code, or an error instead of a child."""

    script: list[int | RoseError]
    words: str = ""
    launches: int = field(default=0)

    async def launch(self, command: Command) -> Ended:
        self.launches += 1
        fate = self.script.pop(0)
        if isinstance(fate, RoseError):
            raise fate
        with command.log_path.open("a") as log:
            log.write(self.words)
        if fate == 0:
            Path(command.arguments[1]).write_text(json.dumps([{"3": -0.5}]))
        return Ended(fate)


def scored(launcher: ScriptedLauncher, folder: Path) -> ProbeScores:
    async def run() -> ProbeScores:
        waits = WaitBoard()
        try:
            return await probe_fresh(
                launcher, folder / "v7", [[1]], work_dir=folder, log_path=folder / "fresh.log", waits=waits
            )
        finally:
            assert waits.snapshot() == ()

    return asyncio.run(run())


REFUSED = ClusterError("cannot fork")


@pytest.mark.parametrize(
    "fates", [(), (-9,), (-9, -9), (REFUSED, -11), (1,), (1, -9), (1, REFUSED)], ids=lambda fates: str(len(fates))
)
def test_a_lost_fresh_engine_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fates: tuple[int | RoseError, ...]
) -> None:
    monkeypatch.setattr(fresh_probe, "_AGAIN_AFTER_S", (0.0, 0.0))
    launcher = ScriptedLauncher([*fates, 0])
    assert scored(launcher, tmp_path).scores == ({3: -0.5},)
    assert launcher.launches == len(fates) + 1
    assert not list(tmp_path.glob("probe-*"))


@pytest.mark.parametrize(
    ("fates", "error", "says"),
    [
        ((-9, -9, -9, 0), EngineError, "ended with code -9"),
        (
            (1, 1, 0),
            EngineError,
            "ended with code 1: ValueError: wrong; last lines of its log:\nValueError: wrong; see",
        ),
        ((-9, 2, 2, 0), EngineError, "ended with code 2"),
        ((REFUSED, REFUSED, REFUSED, 0), ClusterError, "cannot fork"),
        ((-9, LauncherDied("the warm process died (signal 9)"), 0), LauncherDied, "engine: the warm process died"),
    ],
)
def test_what_another_attempt_cannot_mend_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fates: tuple[int | RoseError, ...],
    error: type[RoseError],
    says: str,
) -> None:
    monkeypatch.setattr(fresh_probe, "_AGAIN_AFTER_S", (0.0, 0.0))
    launcher = ScriptedLauncher(list(fates), words="WARNING 11-29 harmless\nValueError: wrong\n")
    with pytest.raises(error) as caught:
        scored(launcher, tmp_path)
    assert says in str(caught.value)
    assert launcher.script == [0]
    assert not list(tmp_path.glob("probe-*"))
