"""What a core does about what its workers tell of their weights; `test_transfer_backend` has the real one."""

from __future__ import annotations

import pytest

from rose.errors import TransferError
from rose_executor.version_label import UNKNOWN, _check, _look, _refuse_if_mixed

MIXED = "the disk is broken"


class Core:
    """As much of vLLM's engine core as is touched."""

    def __init__(self, paused: bool = False) -> None:
        self.paused = paused
        self.label = "default"
        self.aborted = 0

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("abort", True)
        self.paused = True
        self.aborted += 1

    def resume_scheduler(self) -> None:
        self.paused = False

    def look(self, *told: tuple[int | None, str]) -> str:
        _look(self, list(told), lambda core, label: setattr(core, "label", label))
        return self.label


def test_the_label_is_what_all_workers_hold() -> None:
    core = Core()
    assert core.look((None, ""), (None, "")) == "default", "nothing was brought yet"
    assert core.look((7, ""), (None, "")) == "default"
    assert core.look((7, ""), (7, "")) == "7"
    assert core.look((7, ""), (8, "")) == UNKNOWN
    assert core.look((8, ""), (8, "")) == "8"
    assert core.look((None, ""), (None, "")) == UNKNOWN
    _check("8", "8")
    with pytest.raises(TransferError, match=f"the weights are not '8': they are labelled '{UNKNOWN}'"):
        _check("8", core.label)


@pytest.mark.parametrize("paused", [False, True])
def test_mixed_weights_abort_what_runs_and_refuse_what_comes_until_they_are_whole(paused: bool) -> None:
    core = Core(paused)
    core.look((7, ""), (7, ""))
    assert core.look((7, ""), (None, MIXED)) == UNKNOWN
    assert (core.aborted, core.paused) == (1, paused)
    with pytest.raises(TransferError, match=f"no request is taken.*{MIXED}"):
        _refuse_if_mixed(core)
    core.look((8, ""), (8, ""))
    _refuse_if_mixed(core)
    assert (core.aborted, core.paused) == (1, paused)
