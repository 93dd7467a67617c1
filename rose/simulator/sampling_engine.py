"""A simulated engine that samples tokens for its requests, streams them, counts them on a page, and dies.

Invariants
- Every sampled token is on the page of its incarnation before it is sent.
- A page outlives its incarnation; a restart begins a new page at 0.
- Bytes of one stream arrive in order and once; a stream that loses a part is broken from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Never

from rose.driver.faults import FaultPlan
from rose.driver.virtual import VirtualDriver
from rose.ledger import LedgerEvent

TICK_S = 0.02
NETWORK_S = 0.002
HANG_UP_S = 0.03

LedgerDriver = VirtualDriver[LedgerEvent, Never]


@dataclass(slots=True)
class PageSlot:
    """What a token page says about one request."""

    generated: int = 0
    finished: bool = False


@dataclass(slots=True)
class Page:
    """The token page of one incarnation; `read` is the total at its last reading."""

    engine_id: str
    incarnation: str
    total: int = 0
    read: int = 0
    slots: dict[str, PageSlot] = field(default_factory=dict)
    writer_alive: bool = True


@dataclass(slots=True)
class Stream:
    """One request as both ends see it.

    `part` is called at the reader with (stream, tokens, whether they were the last), `broken` once if the
    stream ends in any other way. `unsent` tokens are sampled and wait for the next part.
    """

    request_id: str
    wanted: int
    part: Callable[[Stream, int, bool], None]
    broken: Callable[[Stream], None]
    engine: SamplingEngine
    page: Page
    unsent: int = 0
    whole: bool = True


class SamplingEngine:
    """Runs requests side by side; `sampled` is told of every token the moment it exists.

    `faults` says how often a part is lost, and its stream with it; the driver's own plan must keep streams
    in order and whole.
    """

    def __init__(self, engine_id: str, driver: LedgerDriver, faults: FaultPlan, sampled: Callable[[int], None]) -> None:
        self.engine_id = engine_id
        self._driver = driver
        self._faults = faults
        self._sampled = sampled
        self._starts = 0
        self._streams: list[Stream] = []
        self._part_tokens = driver.random.choice((1, 4, 16))
        self.page = Page(engine_id, "")
        self.start()

    @property
    def alive(self) -> bool:
        return self.page.writer_alive

    def start(self) -> None:
        """Begin a new incarnation with a new page."""
        self._starts += 1
        self.page = Page(self.engine_id, f"{self.engine_id}.{self._starts}")

    def crash(self) -> None:
        """Die at once. What was sent still arrives; every reader then sees its stream break."""
        self.page.writer_alive = False
        for stream in self._streams:
            self._break(stream)
        self._streams = []

    def request(
        self, request_id: str, wanted: int, part: Callable[[Stream, int, bool], None], broken: Callable[[Stream], None]
    ) -> Stream:
        """Ask this incarnation for `wanted` tokens; the request breaks if it is gone when it arrives."""
        stream = Stream(request_id, wanted, part, broken, self, self.page)
        self._driver.call(NETWORK_S, f"{self.engine_id} gets {request_id}", lambda: self._accept(stream))
        return stream

    def close(self, stream: Stream) -> None:
        """The reader hangs up; the engine goes on sampling until it notices."""
        self._driver.call(HANG_UP_S, f"{stream.request_id} closed", lambda: self._finish(stream))

    def _accept(self, stream: Stream) -> None:
        if stream.page is not self.page or not self.alive:
            self._break(stream)
            return
        stream.page.slots[stream.request_id] = PageSlot()
        self._streams.append(stream)
        if len(self._streams) == 1:
            self._schedule_tick(stream.page)

    def _schedule_tick(self, page: Page) -> None:
        self._driver.call(TICK_S, "", lambda: self._tick(page))

    def _tick(self, page: Page) -> None:
        if page is not self.page or not self.alive:
            return
        for stream in list(self._streams):
            self._sample(stream)
        if self._streams:
            self._schedule_tick(page)

    def _sample(self, stream: Stream) -> None:
        slot = stream.page.slots[stream.request_id]
        tokens = min(self._driver.random.randint(1, 3), stream.wanted - slot.generated)
        slot.generated += tokens
        stream.page.total += tokens
        stream.unsent += tokens
        self._sampled(tokens)
        last = slot.generated == stream.wanted
        if last or stream.unsent >= self._part_tokens:
            self._send(stream, last)
        if last:
            self._finish(stream)

    def _send(self, stream: Stream, last: bool) -> None:
        tokens, stream.unsent = stream.unsent, 0
        if not stream.whole:
            return
        if self._faults.dropped(self._driver.random, self._driver.now):
            self._break(stream)
            self.close(stream)
            return
        what = f"{stream.request_id}: part of {tokens}"
        self._driver.send(stream.request_id, what, NETWORK_S, lambda: stream.part(stream, tokens, last))

    def _break(self, stream: Stream) -> None:
        if stream.whole:
            stream.whole = False
            self._driver.send(
                stream.request_id, f"{stream.request_id} breaks", NETWORK_S, lambda: stream.broken(stream)
            )

    def _finish(self, stream: Stream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
        if (slot := stream.page.slots.get(stream.request_id)) is not None:
            slot.finished = True
