"""A Ray that is too slow on a busy machine is started again; one that does not start gets none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from rose.trainer import cluster_main

TOO_SLOW = "The current node timed out during startup. This could happen because"


@dataclass
class FakeRay:
    """Fails with `failures`, one at a time, then starts."""

    failures: list[str]
    calls: list[str] = field(default_factory=list)

    def init(self, **options: Any) -> str:
        self.calls.append("init")
        if self.failures:
            raise RuntimeError(self.failures.pop(0))
        return "started"

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_main, "end_descendants", lambda grace_s: 0)


def test_one_that_was_too_slow_is_started_again() -> None:
    ray = FakeRay([TOO_SLOW])
    assert cluster_main._initiated(ray, "folder", "name") == "started"
    assert ray.calls == ["init", "shutdown", "init"]


@pytest.mark.parametrize("failures", [[TOO_SLOW] * 5, ["no such address"]])
def test_one_that_stays_too_slow_or_fails_otherwise_is_told(failures: list[str]) -> None:
    expected = len(failures)
    ray = FakeRay(list(failures))
    with pytest.raises(RuntimeError, match=failures[0][:10]):
        cluster_main._initiated(ray, "folder", "name")
    assert ray.calls == ["init", "shutdown"] * expected
