"""What a run says about itself while it runs, and how others read it.

- One file, `status.json` in the runtime folder, replaced as a whole: a reader sees the old page or the new one.
- Written on change, at most twice a second, and at least every `HEARTBEAT_S`, so that its age means something.
- Writing never hurts the run: failures are counted, warned of once, and shown in the next page that succeeds.
- Reading never raises: a page that is missing, torn or of another format is a `problem`, not an error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rose.logs import logger
from rose.runs import FoundRun, Run
from rose.waits import WaitBoard

FORMAT: Final = 1
FILE_NAME = "status.json"
WRITE_EVERY_S = 0.5
HEARTBEAT_S = 2.0
STALE_AFTER_S = 10.0
_PAGE_BYTES_MAX = 1 << 22

Fact = bool | int | float | str | None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class Part(_Record):
    """One part of a run (trainer, engine-0, ...), the state it is in and since when (`time.time()` seconds)."""

    name: str
    state: str
    detail: str
    since_s: float


class OpenWait(_Record):
    """A wait of `rose.waits` that was open when the page was written."""

    what: str
    whom: str
    since_s: float
    deadline_s: float


class Page(_Record):
    """Everything in one status file; times are `time.time()` seconds."""

    format: Literal[1] = FORMAT
    run_id: str
    pid: int
    output: str
    started_s: float
    written_s: float
    write_failures: int
    parts: list[Part]
    facts: dict[str, Fact]
    waits: list[OpenWait]


def alike(waits: Sequence[OpenWait]) -> list[list[OpenWait]]:
    """Waits for the same thing from the same kind of party, oldest first in each: hundreds of turns are one line."""
    groups: dict[tuple[str, str], list[OpenWait]] = {}
    for wait in sorted(waits, key=lambda wait: wait.since_s):
        groups.setdefault((wait.what, wait.whom.partition(" ")[0]), []).append(wait)
    return list(groups.values())


def whom(waits: Sequence[OpenWait]) -> str:
    """On whom a group of `alike` waits, in words."""
    return waits[0].whom if len(waits) == 1 else f"{waits[0].whom} and {len(waits) - 1} more"


class StatusBoard:
    """What the parts of this run are doing, written to the run's status file by a thread of its own.

    Any thread may call `part` and `fact`. Use it as a context manager, or call `start` and `close`.
    """

    def __init__(self, run: Run, waits: WaitBoard) -> None:
        self._path = run.runtime / FILE_NAME
        self._run = run
        self._waits = waits
        self._started_s = time.time()
        self._lock = threading.Lock()
        self._parts: dict[str, Part] = {}
        self._facts: dict[str, Fact] = {}
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_until_stopped, name="status", daemon=True)

    @property
    def write_failures(self) -> int:
        """Pages that could not be written so far."""
        return self._failures

    def part(self, name: str, state: str, detail: str = "") -> None:
        """Say what a part is doing; `since` moves only when its state changes."""
        with self._lock:
            before = self._parts.get(name)
            since_s = before.since_s if before and before.state == _text(state) else time.time()
            self._parts[name] = Part(name=_text(name), state=_text(state), detail=_text(detail), since_s=since_s)

    def fact(self, key: str, value: Fact) -> None:
        """Set a figure or a name that readers show as it is (step, version, success, ledger gap, ...)."""
        with self._lock:
            self._facts[_text(key)] = value if isinstance(value, int | float | None) else _text(value)

    def page(self) -> Page:
        """The board as it is now."""
        with self._lock:
            parts, facts = list(self._parts.values()), dict(self._facts)
        return Page(
            run_id=self._run.run_id,
            pid=os.getpid(),
            output=str(self._run.output),
            started_s=self._started_s,
            written_s=time.time(),
            write_failures=self._failures,
            parts=parts,
            facts=facts,
            waits=[
                OpenWait(what=_text(wait.what), whom=_text(wait.whom), since_s=wait.since_s, deadline_s=wait.deadline_s)
                for wait in self._waits.snapshot()
            ],
        )

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self) -> None:
        """Write the last page and stop. Safe to call twice."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5.0)

    def __enter__(self) -> StatusBoard:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_until_stopped(self) -> None:
        shown: dict[str, object] | None = None
        written_s = 0.0
        stopped = False
        while not stopped:
            stopped = self._stop.wait(WRITE_EVERY_S if shown else 0)
            page = self.page()
            now_shown = page.model_dump(exclude={"written_s"})
            if now_shown != shown or page.written_s - written_s >= HEARTBEAT_S:
                self._write(page)
                shown, written_s = now_shown, page.written_s

    def _write(self, page: Page) -> None:
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(page.model_dump_json(), encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:
            with suppress(OSError):  # a disk that takes nothing gives nothing up
                fresh.unlink(missing_ok=True)
            self._failures += 1
            if self._failures == 1:
                logger("status").warning(
                    "status cannot be written; the run goes on", path=str(self._path), reason=error.strerror
                )


def _text(value: object) -> str:
    """Text that JSON can carry, whatever an environment or a file name put into it."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


class Liveness(StrEnum):
    """LIVE: running and reporting. STALE: running, but silent for too long. DEAD: gone without cleaning up."""

    LIVE = "live"
    STALE = "stale"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What a reader can say of a run: its page, or the `problem` that stands in the way of reading it.

    `age_s` is the time since the page was written.
    """

    run_id: str
    liveness: Liveness
    age_s: float | None
    page: Page | None
    problem: str


def read_status(found: FoundRun, now_s: float) -> RunStatus:
    """Read a run's page as of `now_s` (`time.time()` seconds). Never raises."""
    page, problem = _read_page(found.runtime / FILE_NAME)
    age_s = None if page is None else max(0.0, now_s - page.written_s)
    if not found.alive:
        liveness = Liveness.DEAD
    elif age_s is None or age_s > STALE_AFTER_S:
        liveness = Liveness.STALE
    else:
        liveness = Liveness.LIVE
    return RunStatus(found.run_id, liveness, age_s, page, problem)


def _read_page(path: Path) -> tuple[Page | None, str]:
    try:
        with path.open("rb") as file:
            raw = file.read(_PAGE_BYTES_MAX)
    except FileNotFoundError:
        return None, "no status written yet"
    except OSError as error:
        return None, f"status cannot be read: {error.strerror}"
    try:
        return Page.model_validate_json(raw), ""
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        if place == "format":
            return None, f"status of another version of rose: format {first['input']!r}, this one reads {FORMAT}"
        return None, f"status is damaged: {place or 'file'}: {first['msg']}"
