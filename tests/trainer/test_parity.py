"""The proof after an update: live against fresh, one at a time, every token of it booked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_ins import Answer, Asked, Lost, Refused, Reply, Script, ScriptedSupervisor

from rose.errors import ContractError, EngineError
from rose.ledger import Account
from rose.trainer.books import Books
from rose.trainer.parity import ParityCheck, probe_prefixes
from rose.waits import WaitBoard
from rose_executor.fresh_probe import ProbeScores

PREFIXES = [[1], [1, 2], [1, 2, 3]]


def answers(asked: Asked) -> Reply:
    return Answer((7,))


class Versions:
    """Holds versions, as folders named for them."""

    def __init__(self) -> None:
        self.holding: list[int] = []

    @contextlib.asynccontextmanager
    async def held(self, version: int, by: str) -> AsyncIterator[SimpleNamespace]:
        self.holding.append(version)
        try:
            yield SimpleNamespace(path=Path(f"v{version}"))
        finally:
            self.holding.remove(version)


class Bench:
    """A check whose fresh engine answers like the live one, off by `difference`, once `proven` lets it."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.difference = 0.0
        self.failure: Exception | None = None
        self.recorded: list[tuple[int, float]] = []
        self.engine_versions = Versions()

    def run(self, body: Callable[[], Awaitable[None]], script: Script = answers) -> None:
        async def whole() -> None:
            self.proven = asyncio.Event()
            self.proven.set()
            self.supervisor = ScriptedSupervisor(script, self.books.watch)
            recorder = SimpleNamespace(during=self._during, parity=lambda *row: self.recorded.append(row))
            self.check = ParityCheck(
                PREFIXES,
                1e-4,
                self.supervisor,  # type: ignore[arg-type]
                self.engine_versions,  # type: ignore[arg-type]
                self._score_fresh,
                self.books,
                recorder,  # type: ignore[arg-type]
                WaitBoard(),
            )
            async with asyncio.timeout(10):
                await body()

        asyncio.run(whole())

    @contextlib.contextmanager
    def _during(self, name: str, *, background: bool = False) -> Iterator[None]:
        assert background, "a proof is not what the run is doing"
        yield

    async def _score_fresh(self, path: Path, prefixes: list[list[int]]) -> ProbeScores:
        assert self.engine_versions.holding == [int(path.name[1:])]
        await self.proven.wait()
        if self.failure is not None:
            raise self.failure
        return ProbeScores(tuple(dict.fromkeys(range(20), -0.5 + self.difference) for _ in prefixes))

    def balances(self) -> dict[Account, int]:
        self.books.close()
        assert self.books.ledger.balanced(), self.books.ledger.violations()
        return self.books.ledger.accounts()


@pytest.fixture
def bench(books: Books) -> Bench:
    return Bench(books)


def test_prefixes_are_every_prompt_whole_and_cut_and_never_empty() -> None:
    assert probe_prefixes([[1, 2, 3, 4], [9]]) == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [9], [9], [9], [9]]


def test_engines_that_agree_are_recorded_and_the_probe_is_booked_as_evaluation(bench: Bench) -> None:
    async def body() -> None:
        bench.difference = 5e-5
        await bench.check.start(3)
        await bench.check.finish()
        assert [row[0] for row in bench.recorded] == [3]
        assert bench.recorded[0][1] == pytest.approx(5e-5)
        assert [list(asked.token_ids) for asked in bench.supervisor.asked] == PREFIXES
        assert bench.engine_versions.holding == []

    bench.run(body)
    assert bench.balances()[Account.EVALUATION] == len(PREFIXES)


def test_engines_that_differ_break_the_contract_and_the_difference_is_on_record(bench: Bench) -> None:
    async def body() -> None:
        bench.difference = 2e-4
        await bench.check.start(1)
        with pytest.raises(ContractError, match=r"version 1 .* differ .* 2.00e-04"):
            await bench.check.finish()
        assert bench.recorded[0][1] == pytest.approx(2e-4)
        await bench.check.finish()  # told once

    bench.run(body)


def test_a_proof_runs_beside_the_next_step_and_is_waited_for_before_the_next_proof(bench: Bench) -> None:
    async def body() -> None:
        bench.proven.clear()
        await bench.check.start(1)  # returns although nothing is proven yet
        second = asyncio.create_task(bench.check.start(2))
        await asyncio.sleep(0.02)
        assert len(bench.supervisor.asked) == len(PREFIXES)
        bench.proven.set()
        await second
        await bench.check.finish()
        assert [row[0] for row in bench.recorded] == [1, 2]

    bench.run(body)


def test_a_failed_proof_comes_out_at_the_next_start(bench: Bench) -> None:
    async def body() -> None:
        bench.failure = EngineError("the fresh engine ended with code 1")
        await bench.check.start(1)
        with pytest.raises(EngineError, match="code 1"):
            await bench.check.start(2)

    bench.run(body)


def test_a_probe_whose_engine_dies_is_repeated_on_the_next_and_both_are_booked(bench: Bench) -> None:
    def script(asked: Asked) -> Reply:
        return Lost((), generated=1) if asked.request_id.startswith("p1.0-") else answers(asked)

    async def body() -> None:
        await bench.check.start(1)
        await bench.check.finish()
        assert {asked.incarnation for asked in bench.supervisor.asked} == {f"{0:016x}", f"{1:016x}"}

    bench.run(body, script)
    accounts = bench.balances()
    assert (accounts[Account.EVALUATION], accounts[Account.UNRECEIVED]) == (len(PREFIXES), len(PREFIXES))


@pytest.mark.parametrize("reply", [Lost((), generated=1), Refused()])
def test_a_probe_that_never_succeeds_ends_with_an_engine_error_and_books_that_close(bench: Bench, reply: Reply) -> None:
    async def body() -> None:
        with pytest.raises(EngineError):
            await bench.check.start(1)
        assert len(bench.supervisor.asked) <= 3 * len(PREFIXES)

    bench.run(body, lambda asked: reply)
    assert bench.balances()[Account.EVALUATION] == 0


def test_cancelling_drops_the_open_proof_and_lets_go_of_its_version(bench: Bench) -> None:
    async def body() -> None:
        bench.proven.clear()
        await bench.check.start(1)
        await asyncio.sleep(0.01)
        assert bench.engine_versions.holding == [1]
        await bench.check.cancel()
        assert bench.engine_versions.holding == []
        assert bench.recorded == []
        await bench.check.cancel()
        await bench.check.finish()

    bench.run(body)
