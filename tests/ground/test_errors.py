"""Errors say where, what was expected and what to do, also behind another process."""

from __future__ import annotations

import pickle

import pytest

from rose.errors import ConfigError, DeadlineExceeded, RoseError, TransferError


class Lost(TransferError):
    """One that asks for more than words, as those of the boundaries do."""

    def __init__(self, what: str, kept: list[int]) -> None:
        super().__init__(what, expected="all", to_do="ask again")
        self.kept = kept


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no such file", expected="a job file", to_do="check the path"),
        DeadlineExceeded("no answer", boundary="engine"),
        Lost("half of it", [1, 2]),
    ],
)
def test_an_error_is_the_same_in_another_process(error: RoseError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
