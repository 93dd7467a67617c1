"""A rollout engine: requests come in, tokens that follow from context and weights go out and onto its page.

Invariants
- Every token is on the page of its incarnation before it is sent; the page outlives the incarnation.
- Parts of one stream arrive in order and once; a stream that loses a part is broken from there on.
- Nothing is sampled unless the weights are one whole version and not being changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rose.simulator.coserving.chain import absorbed, link_behind, sampled
from rose.simulator.coserving.parts import PartsDriver
from rose.simulator.loading_engine import LoadingEngine
from rose.simulator.sampling_engine import HANG_UP_S, NETWORK_S, Page, PageSlot
from rose.simulator.world import must

STREAM_INTERVAL = 4
STEP_S = 0.02
CHUNK = 64
_POLL_S = 0.02

Sampled = tuple[int, int]
"""A token and the version that it is stamped with."""


@dataclass(slots=True)
class Request:
    """One request, as both ends see it.

    `part` is called at the reader with the tokens that arrived and whether they were the last, `broken` if the stream
    ends otherwise. `to_read` are context tokens not yet computed, `link` is where the chain stands.
    """

    request_id: str
    context: Sequence[int]
    wanted: int
    part: Callable[[Request, list[Sampled], bool], None]
    broken: Callable[[Request], None]
    to_read: int = 0
    link: int = 0
    whole: bool = True
    unsent: list[Sampled] = field(default_factory=list)


class RolloutEngine(ABC):
    """One incarnation. `made` hears of every token and its version; `breaks` is the chance that a part is lost."""

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        weights: LoadingEngine,
        driver: PartsDriver,
        made: Callable[[RolloutEngine, int], None],
        breaks: float,
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.weights = weights
        self.page = Page(engine_id, incarnation)
        self.requests: list[Request] = []
        self.driver = driver
        self._made = made
        self._breaks = breaks

    @property
    def alive(self) -> bool:
        return self.page.writer_alive

    @property
    def version(self) -> int:
        """What its weights are, where they are whole."""
        return self.weights.shards[0]

    def submit(self, request: Request) -> None:
        """Send a request; it breaks if the engine is gone when it arrives."""
        what = f"{self.incarnation} gets {request.request_id}"
        self.driver.call(NETWORK_S, what, lambda: self._accept(request))

    def hang_up(self, request: Request) -> None:
        """The reader is gone; the engine goes on until it notices."""
        self.driver.call(HANG_UP_S, f"{request.request_id} is let go", lambda: self._finish(request))

    def crash(self) -> None:
        """Die at once. What was sent still arrives; every reader then sees its stream break."""
        self.page.writer_alive = False
        self.weights.alive = False
        for request in self.requests:
            self._break(request)
        self.requests = []

    @abstractmethod
    def kick(self) -> None:
        """There may be something to compute."""

    def plan(self, tokens: int, seqs: int) -> list[tuple[Request, int]]:
        """The next step: at most so many tokens, for the `seqs` oldest requests; a later one that ran is set back."""
        planned: list[tuple[Request, int]] = []
        for request in self.requests[:seqs]:
            share = min(max(1, request.to_read), tokens)
            if share:
                planned.append((request, share))
                tokens -= share
        for request in self.requests[seqs:]:
            request.to_read = len(request.context)
        return planned

    def compute(self, planned: list[tuple[Request, int]]) -> None:
        """A step is over: each of its requests has read on or, where nothing is left to read, has one token more."""
        for request, share in planned:
            if request not in self.requests:
                continue
            request.to_read = max(0, request.to_read - share)
            if not request.to_read:
                self._sample(request)

    def _accept(self, request: Request) -> None:
        if not self.alive:
            self._break(request)
            return
        self.page.slots[request.request_id] = PageSlot()
        request.to_read, request.link = len(request.context), link_behind(request.context)
        self.requests.append(request)
        self.kick()

    def _sample(self, request: Request) -> None:
        shards = self.weights.shards
        must(len(set(shards)) == 1 and not self.weights.paused, "sampled on weights that are no version", shards)
        token = sampled(request.link, shards[0])
        request.link = absorbed(request.link, token)
        request.unsent.append((token, shards[0]))
        slot = self.page.slots[request.request_id]
        slot.generated += 1
        self.page.total += 1
        self._made(self, shards[0])
        last = slot.generated == request.wanted
        if last or len(request.unsent) >= STREAM_INTERVAL:
            self._send(request, last)
        if last:
            self._finish(request)

    def _send(self, request: Request, last: bool) -> None:
        tokens, request.unsent = request.unsent, []
        if not request.whole:
            return
        if self.driver.now < self.driver.faults.until_s and self.driver.random.random() < self._breaks:
            self._break(request)
            self.hang_up(request)
            return
        what = f"{request.request_id}: {len(tokens)} tokens"
        self.driver.call(NETWORK_S, what, lambda: request.part(request, tokens, last))

    def _break(self, request: Request) -> None:
        if request.whole:
            request.whole = False
            self.driver.call(NETWORK_S, f"{request.request_id} breaks", lambda: request.broken(request))

    def _finish(self, request: Request) -> None:
        if request in self.requests:
            self.requests.remove(request)
        if (slot := self.page.slots.get(request.request_id)) is not None:
            slot.finished = True


class DedicatedEngine(RolloutEngine):
    """Has a core of its own: steps follow one another as long as there are requests."""

    _stepping = False

    def kick(self) -> None:
        if not self._stepping and self.alive and self.requests:
            self._stepping = True
            planned = self.plan(CHUNK, CHUNK) if self.weights.serving else []
            self.driver.call(STEP_S if planned else _POLL_S, "", lambda: self._stepped(planned))

    def _stepped(self, planned: list[tuple[Request, int]]) -> None:
        self._stepping = False
        if self.alive and self.weights.serving:
            self.compute(planned)
        self.kick()
