"""The command that sweeps seeds and the one that replays a failure."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner, Result

from rose.ledger import LedgerEvent, RequestEnded, TokenLedger
from rose.simulator import __main__ as command
from rose.simulator.ledger_world import LedgerWorld
from rose.simulator.worlds import WORLDS


class ForgetsUnreceived(TokenLedger):
    def step(self, event: LedgerEvent, now: float) -> tuple[()]:
        if isinstance(event, RequestEnded):
            event = RequestEnded(event.request_id, None)
        return super().step(event, now)


@pytest.fixture
def broken_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORLDS, "ledger", lambda seed: LedgerWorld(seed, ForgetsUnreceived()))


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command.main)
    return CliRunner().invoke(app, list(arguments))


def test_all_worlds_are_swept() -> None:
    result = run("all", "--seeds", "5", "--first", "10")
    assert result.exit_code == 0
    assert [line.split(",")[0] for line in result.output.splitlines()] == [
        "ledger: seeds 10 to 14 hold",
        "versions: seeds 10 to 14 hold",
        "links: seeds 10 to 14 hold",
        "distribution: seeds 10 to 14 hold",
        "relay: seeds 10 to 14 hold",
        "coserving: seeds 10 to 14 hold",
    ]


def test_a_failing_sweep_ends_with_1_and_names_a_command_that_shows_the_same(broken_ledger: None) -> None:
    swept = run("ledger", "--seeds", "300")
    assert swept.exit_code == 1
    last = swept.output.splitlines()[-1]
    seed = last.rsplit(" ", 1)[1]
    assert last.endswith(f"replay it with: ./dev python -m rose.simulator ledger --seed {seed}")
    replayed = run("ledger", "--seed", seed)
    assert replayed.exit_code == 1
    assert replayed.output.splitlines()[-1] == last
    assert f"ledger, seed {seed}: trace " in replayed.output


def test_a_sound_seed_replays_with_its_trace() -> None:
    result = run("versions", "--seed", "3")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) > 20
    assert lines[-1].startswith("versions, seed 3: trace ")


def test_an_unknown_world_is_refused_with_what_there_is() -> None:
    result = run("weather")
    assert result.exit_code == 2
    assert all(name in result.output for name in ("weather", *WORLDS))
