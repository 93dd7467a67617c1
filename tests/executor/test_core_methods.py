"""The commit, step by step, on a core that records what was done to it: all or nothing, or poisoned."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from rose_executor.core_methods import rose_commit, rose_describe, rose_loaded, rose_resume
from rose_executor.version_follower import NOT_STAGED


class Page:
    version = 1


class Scheduler:
    token_page = Page()


class Core:
    """As much of vLLM's engine core as the methods touch. `fails` names the step that raises.

    `answers` are those of the two workers to a method that says what went wrong.
    """

    def __init__(
        self,
        *,
        staged: int = 2,
        paused: bool = False,
        in_flight: bool = False,
        fails: str = "",
        answers: dict[str, list[str]] | None = None,
    ) -> None:
        self.scheduler = Scheduler()
        self.scheduler.token_page = Page()
        self.paused = paused
        self.weight_version = "1"
        self.done: list[str] = []
        self.idle: Future[None] | None = Future() if in_flight else None
        self.anew = [False, False]
        self._staged = staged
        self.fails = fails
        self._answers = answers or {}

    def _did(self, what: str) -> None:
        self.done.append(what)
        if what == self.fails:
            raise OSError(f"{what} broke")

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "rose_staged":
            return [
                {"version": self._staged, "anew": anew, "bytes": 8, "verify_ms": 1.0, "error": ""} for anew in self.anew
            ]
        assert self.paused or method == "rose_loaded"
        self._did(method)
        return self._answers.get(method, ["", ""])

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True
        return self.idle

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def resume_scheduler(self) -> None:
        self._did("resume")
        self.paused = False

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        assert reset_running_requests
        self._did("reset")
        return self.fails != "reset refused"

    def set_weight_version(self, version: str) -> None:
        self._did(f"version {version}")
        self.weight_version = version


WHOLE = ["rose_apply", "reset", "version 2", "rose_settled", "resume"]
UNDONE = ["rose_undo", "rose_settled", "resume"]


def test_the_version_changes_after_weights_and_cache_and_before_any_step() -> None:
    core = Core()
    timings = rose_commit(core, 2, False)
    assert core.done == WHOLE
    assert (core.weight_version, core.scheduler.token_page.version, core.paused) == ("2", 2, False)
    assert timings["pause_ms"] >= timings["load_ms"] >= 0
    assert timings["undone"] == ""
    assert rose_describe(core) == {"paused": False, "poisoned": "", "version": 2}


def test_a_step_in_flight_is_awaited() -> None:
    core = Core(in_flight=True)
    result = rose_commit(core, 2, False)
    assert (core.done, core.paused) == ([], True)
    assert core.idle is not None
    core.idle.set_result(None)
    assert core.done == WHOLE
    assert result.result(timeout=0)["drain_ms"] >= 0


def test_an_engine_that_was_paused_stays_paused() -> None:
    core = Core(paused=True)
    rose_commit(core, 2, False)
    assert core.done == WHOLE[:-1]
    assert core.paused


def test_a_version_that_is_not_staged_changes_nothing() -> None:
    core = Core(staged=3)
    with pytest.raises(RuntimeError, match=f"version 2 {NOT_STAGED}"):
        rose_commit(core, 2, False)
    assert core.done == []
    assert not core.paused


def commit_to_the_end(core: Core) -> Any:
    result = rose_commit(core, 2, False)
    if core.idle is not None:
        core.idle.set_result(None)
        return result.result(timeout=0)
    return result


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(
    ("options", "done", "why"),
    [
        ({"answers": {"rose_apply": ["", "tile 3"]}}, ["rose_apply", *UNDONE], "tile 3"),
        ({"fails": "reset refused"}, ["rose_apply", "reset", *UNDONE], "the prefix cache could not be emptied"),
    ],
    ids=["one worker's weights", "prefix cache"],
)
def test_a_failure_is_taken_back_on_all_workers_and_the_old_version_goes_on(
    options: dict[str, Any], done: list[str], why: str, in_flight: bool
) -> None:
    core = Core(in_flight=in_flight, **options)
    assert commit_to_the_end(core)["undone"] == why
    assert core.done == done
    assert (core.weight_version, core.scheduler.token_page.version, core.paused) == ("1", 1, False)
    assert rose_describe(core)["poisoned"] == ""


MIXED = {"rose_apply": ["tile 3", ""], "rose_undo": ["", "tile 1"]}


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"answers": MIXED}, *({"fails": step} for step in ("rose_apply", "reset", "version 2", "rose_settled"))],
    ids=str,
)
def test_a_failure_that_is_not_taken_back_poisons_the_engine(options: dict[str, Any], in_flight: bool) -> None:
    core = Core(in_flight=in_flight, **options)
    with pytest.raises((OSError, RuntimeError)):
        commit_to_the_end(core)
    assert core.paused
    assert "resume" not in core.done
    assert "version 2 failed half-way" in rose_describe(core)["poisoned"]
    with pytest.raises(RuntimeError, match="poisoned"):
        rose_resume(core)
    with pytest.raises(RuntimeError, match="poisoned"):
        rose_commit(core, 2, False)
    assert core.paused


@pytest.mark.parametrize("paused", [False, True])
def test_a_poisoned_engine_goes_on_once_a_version_that_begins_anew_everywhere_is_in_force(paused: bool) -> None:
    core = Core(paused=paused, fails="rose_apply")
    with pytest.raises(OSError, match="broke"):
        rose_commit(core, 2, False)
    core.done.clear()
    core.anew = [True, False]
    with pytest.raises(RuntimeError, match="does not begin anew: version 2 failed half-way: rose_apply broke"):
        rose_commit(core, 2, False)
    assert core.done == []
    core.anew = [True, True]
    core.fails = ""
    assert rose_commit(core, 2, False)["undone"] == ""
    assert core.done == (WHOLE[:-1] if paused else WHOLE)
    assert rose_describe(core) == {"paused": paused, "poisoned": "", "version": 2}
    rose_resume(core)


def test_what_is_taken_back_to_mixed_weights_leaves_the_engine_poisoned() -> None:
    core = Core(fails="rose_apply")
    with pytest.raises(OSError, match="broke"):
        rose_commit(core, 2, False)
    core.anew, core.fails = [True, True], "reset refused"
    with pytest.raises(RuntimeError, match="mixed before"):
        rose_commit(core, 2, False)
    assert core.paused
    assert "mixed before" in rose_describe(core)["poisoned"]
    core.fails = ""
    rose_commit(core, 2, False)
    assert not core.paused


def test_keys_and_values_are_kept_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core()
    monkeypatch.setattr("rose_executor.core_methods.rekey", lambda scheduler, version: core._did("rekey") or "")
    assert rose_commit(core, 2, True)["undone"] == ""
    assert core.done == ["rose_apply", "rekey", "version 2", "rose_settled", "resume"]


def test_where_they_cannot_be_kept_the_old_version_goes_on() -> None:
    core = Core()
    core.scheduler.connector = object()  # type: ignore[attr-defined]
    assert "a connector" in rose_commit(core, 2, True)["undone"]
    assert core.done == ["rose_apply", *UNDONE]
    assert (core.weight_version, core.paused) == ("1", False)


def test_the_version_loaded_at_start_is_named_everywhere() -> None:
    core = Core()
    rose_loaded(core, 5)
    assert core.done == ["rose_loaded", "version 5"]
    assert (core.weight_version, core.scheduler.token_page.version) == ("5", 5)
