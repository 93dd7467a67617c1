"""Who used the processor while a command ran: CPU seconds of every process below it, by its part in ROSE.

Processes are read once a second; what one used in its last second before it ended is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType

import psutil

EVERY_S = 1.0
_PARTS = (
    ("rose.workload.load_main", "load client"),
    ("rose.cli.main dashboard", "dashboard"),
    ("rose.cli.main scheduler", "scheduler"),
    ("ray::_AsyncHost", "environments"),
    ("ray::_Host", "actor and reference"),
    ("rose.trainer.cluster_main", "Ray itself"),
    ("/ray/", "Ray itself"),
    ("ray::", "Ray itself"),
)
_ENGINE = ("rose_executor.engine_main", "rose_executor.warm_main", "VLLM::")
_OWNERS = (
    ("rose.cli.main executor", "executor", "guest engine"),
    ("rose.cli.main run", "run", "dedicated engine"),
)


@dataclass(frozen=True, slots=True)
class Process:
    """One process as it is now; `life` tells it from another that has its number later."""

    pid: int
    parent: int
    life: float
    cpu_s: float
    command: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What every part had used in all, in CPU seconds, at `at_s` of the clock on the wall."""

    at_s: float
    used_s: Mapping[str, float]


@dataclass(slots=True)
class CpuWatch:
    """A thread that reads while its body runs; for the processes that the calling process starts."""

    readings: list[Reading] = field(default_factory=list)
    _known_s: dict[tuple[int, float], float] = field(default_factory=dict)
    _used_s: dict[str, float] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _error: Exception | None = None

    def __enter__(self) -> CpuWatch:
        self._thread = threading.Thread(target=self._watch, name="cpu watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _watch(self) -> None:
        try:
            while not self._ended.wait(EVERY_S):
                self._read(list(processes()), time.time())
        except Exception as error:  # noqa: BLE001 - told where the body ends
            self._error = error

    def _read(self, running: Sequence[Process], at_s: float) -> None:
        # What a process uses counts for the part that it plays by then: it may have had another name before.
        for process, part in parts(running, os.getpid()):
            known_s = self._known_s.get((process.pid, process.life), 0.0)
            self._used_s[part] = self._used_s.get(part, 0.0) + process.cpu_s - known_s
            self._known_s[process.pid, process.life] = process.cpu_s
        self.readings.append(Reading(at_s, dict(self._used_s)))


def processes() -> Iterable[Process]:
    """All that can be read. One that has ended and waits for its parent says nothing of who it was, and is left out."""
    for one in psutil.process_iter(["ppid", "create_time", "cpu_times", "cmdline"]):
        known = one.info
        if known["cmdline"] and known["cpu_times"] is not None:
            cpu_s = known["cpu_times"].user + known["cpu_times"].system
            yield Process(one.pid, known["ppid"], known["create_time"], cpu_s, " ".join(known["cmdline"]))


def parts(running: Sequence[Process], root: int) -> Iterable[tuple[Process, str]]:
    """The processes below `root`, each with the part that it plays."""
    by_pid = {process.pid: process for process in running}
    for process in running:
        above = _above(process, by_pid)
        if root in (one.pid for one in above) and process.pid != root:
            yield process, _part(process, above)


def _above(process: Process, by_pid: Mapping[int, Process]) -> list[Process]:
    """Itself and its parents, the nearest first."""
    chain = [process]
    while (parent := by_pid.get(chain[-1].parent)) is not None and parent not in chain:
        chain.append(parent)
    return chain


def _part(process: Process, above: Sequence[Process]) -> str:
    for mark, part in _PARTS:
        if mark in process.command:
            return part
    engine = any(mark in process.command for mark in _ENGINE)
    for one in above:
        for mark, owner, its_engine in _OWNERS:
            if mark in one.command:
                return its_engine if engine else owner
    return "serving engine" if engine else "director"


def used(readings: Sequence[Reading], spans: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Cores that each part used on average over the spans (from, to), of the clock of `Reading.at_s`.

    A reading's seconds count as far as a span covers them. {} if no span lies within the readings.
    """
    total: Counter[str] = Counter()
    covered_s = 0.0
    for before, after in pairwise(readings):
        length_s = after.at_s - before.at_s
        overlap_s = sum(max(0.0, min(to, after.at_s) - max(since, before.at_s)) for since, to in spans)
        if length_s <= 0 or not overlap_s:
            continue
        covered_s += overlap_s
        for part, now_s in after.used_s.items():
            total[part] += (now_s - before.used_s.get(part, 0.0)) * overlap_s / length_s  # type: ignore[assignment]
    return {part: cpu_s / covered_s for part, cpu_s in total.items()} if covered_s else {}
