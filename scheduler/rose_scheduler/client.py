"""What trainers, agents and executors use to speak to a scheduler.

Invariants
- Every wait has a deadline and stands on the wait board while it lasts.
- A scheduler that is away, or comes back with an empty memory, is no error before the deadline: a lease is asked for
  again under its own id, and an engine that is unknown offers itself anew.
- A lease that was granted is reported ended once, whatever became of the turn; a report that cannot be delivered is
  told in the log, and the lease then ends with its term.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from rose.certificates import Certificates
from rose.errors import ContractError, DeadlineExceeded, EngineError, SchedulerError
from rose.logs import logger
from rose.proto.v1 import scheduler_pb2 as wire
from rose.waits import WaitBoard
from rose_scheduler.calls import GRACE_S, Calls
from rose_scheduler.events import EngineOffered, LeaseOutcome, Reason, Standing
from rose_scheduler.wire import AVOIDED_MAX, KINDS, OUTCOMES, REASONS, STANDINGS, Malformed, member_of

log = logger("scheduler client")


class LeaseRefused(SchedulerError):
    """No lease, and asking again is of no use."""

    def __init__(self, reason: Reason, what: str) -> None:
        super().__init__(f"the lease is refused ({reason}): {what}")
        self.reason = reason


class NotTaken(SchedulerError):
    """This incarnation of an engine gets no turns, now or later: another has its place, or it was offered otherwise."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a lease is asked for. `number` counts from 0.

    `context_tokens` are those that the engine is to read before it samples.

    `avoid`: incarnations on which it is not to be placed; of many the newest `AVOIDED_MAX` count. `group_size` is how
    many trajectories its group has in all.
    """

    trajectory_id: str
    group_id: str
    number: int
    context_tokens: int
    min_version: int = 0
    avoid: tuple[str, ...] = ()
    group_size: int = 1
    evaluation: bool = False


@dataclass(slots=True)
class Lease:
    """A place for one turn, until `until_s` (`time.monotonic()`); `token` is what the engine is shown.

    `counts_address` is where the engine's tokens are counted, empty for the run's own engines; the engine is to keep
    the prefix the longer, the lower `keep_rank` is.

    Whoever holds it sets `tokens`, how many were received, and may set `outcome`; by default that follows from how
    the body of the `async with` ends.
    """

    lease_id: str
    engine_id: str
    incarnation: str
    address: str
    weight_version: int
    affine: bool
    until_s: float
    token: str = field(repr=False)
    counts_address: str = ""
    keep_rank: int = 0
    tokens: int = 0
    outcome: LeaseOutcome | None = None


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine says of itself in each beat; see `rose_scheduler.events.EngineBeat`."""

    weight_version: int
    slots_open: int
    kv_used_fraction: float
    kv_tokens: int = 0
    token_s: float = 0.0


class SchedulerClient:
    """One scheduler, at `address` (host:port). `timeout_s` is how long a report of an end, an offer or a beat may take.

    With `certificates` it speaks TLS, and shows its own.

    Every method raises SchedulerError if the scheduler does not accept the token, the certificate or the call,
    and DeadlineExceeded if it gives no answer in time; of a scheduler that does not answer at all, `GRACE_S` later.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        waits: WaitBoard,
        timeout_s: float = 10.0,
        certificates: Certificates | None = None,
    ) -> None:
        self._calls = Calls(address, token=token, waits=waits, timeout_s=timeout_s, certificates=certificates)
        self._waits = waits

    @asynccontextmanager
    async def lease(self, turn: Turn, *, wait_s: float, hold_s: float) -> AsyncIterator[Lease]:
        """A place for a turn, waited for at most `wait_s` and held at most `hold_s` seconds.

        Leaving the body reports the end: DONE; FAILED if it raises EngineError; ABANDONED if it raises anything else.
        Raises LeaseRefused if there can be none, and DeadlineExceeded if there was none in time.
        """
        lease = await self._ask(turn, wait_s, hold_s)
        outcome = LeaseOutcome.ABANDONED
        try:
            yield lease
            outcome = LeaseOutcome.DONE
        except EngineError:
            outcome = LeaseOutcome.FAILED
            raise
        finally:
            await self._end(lease, lease.outcome or outcome)

    async def over(self, trajectory_id: str) -> None:
        """A trajectory takes no more turns: others may have its place. What cannot be told is said in the log."""
        request = wire.EndTrajectoryRequest(trajectory_id=trajectory_id)
        try:
            reply = await self._calls.trajectory_ended(request)
        except (DeadlineExceeded, SchedulerError) as error:
            log.warning("the end of a trajectory could not be told", trajectory_id=trajectory_id, why=str(error))
            return
        if reply.verdict == wire.END_VERDICT_MALFORMED:
            raise ContractError(f"the end of trajectory {trajectory_id} is malformed: {reply.what}")

    async def offer(self, engine: EngineOffered) -> Standing:
        """Tell of an engine; the same offer may be made again."""
        request = wire.RegisterEngineRequest(
            engine_id=engine.engine_id,
            incarnation=engine.incarnation,
            kind=KINDS[engine.kind],
            address=engine.address,
            max_requests=engine.max_requests,
            weight_version=engine.weight_version,
            counts_address=engine.counts_address,
        )
        return await self._tell_engine("an engine's registration", "RegisterEngine", request)

    async def beat(self, engine: EngineOffered, state: EngineState) -> Standing:
        """Say that an engine lives, and how it is."""
        request = wire.BeatRequest(
            engine_id=engine.engine_id,
            incarnation=engine.incarnation,
            weight_version=state.weight_version,
            slots_open=state.slots_open,
            kv_used_fraction=state.kv_used_fraction,
            kv_tokens=state.kv_tokens,
            token_ms=state.token_s * 1000,
        )
        return await self._tell_engine("an engine's beat", "Beat", request)

    async def withdraw(self, engine: EngineOffered, why: str) -> Standing:
        """Take this incarnation back for good; what runs on it is lost."""
        request = wire.WithdrawEngineRequest(engine_id=engine.engine_id, incarnation=engine.incarnation, why=why)
        return await self._tell_engine("an engine's withdrawal", "WithdrawEngine", request)

    async def keep_offered(
        self,
        engine: EngineOffered,
        state: Callable[[], EngineState],
        *,
        every_s: float,
        told: Callable[[str], None] = lambda trouble: None,
    ) -> NoReturn:
        """Offer an engine and beat for it until cancelled, through restarts of the scheduler.

        `told` hears after each beat what stands in the way of traffic, "" if nothing does. Raises NotTaken if another
        incarnation has taken its place, or it was offered otherwise.
        """
        trouble = ""
        while True:
            before, trouble = trouble, await self._trouble(engine, state)
            told(trouble)
            if trouble and not before:
                log.warning("engine gets no traffic; beating on", engine_id=engine.engine_id, why=trouble)
            elif before and not trouble:
                log.info("engine is offered again", engine_id=engine.engine_id)
            await asyncio.sleep(every_s)

    async def status(self) -> Any:
        """The scheduler's state, as `rose.v1.SchedulerStatus`."""
        return await self._calls.answer("a status", "Status", wire.StatusRequest())

    async def why(self, some_id: str) -> Any:
        """What a trajectory (or a lease of it) waits for, as `rose.v1.WhyReply`."""
        return await self._calls.answer("a reason", "Why", wire.WhyRequest(some_id=some_id))

    async def close(self) -> None:
        """End every call that is under way with SchedulerError; further ones are ContractErrors."""
        await self._calls.close()

    async def __aenter__(self) -> SchedulerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, turn: Turn, wait_s: float, hold_s: float) -> Lease:
        until_s = time.monotonic() + wait_s
        lease_id = _new_lease_id()
        with self._waits.waiting("a lease", f"{self._calls.whom} for {turn.trajectory_id}", wait_s + GRACE_S):
            while True:
                request = partial(_question, lease_id, turn, hold_s)
                left_s = until_s - time.monotonic()
                reply = await self._calls.lease_asked(request, left_s)
                if reply.HasField("grant"):
                    return _lease(lease_id, reply.grant)
                if reply.HasField("lapse"):
                    raise self._calls.late("a lease", wait_s, reply.lapse.what)
                if await self._must_be_new(reply.refusal, until_s, wait_s):
                    lease_id = _new_lease_id()

    async def _must_be_new(self, refusal: Any, until_s: float, wait_s: float) -> bool:
        """Wait until asking again makes sense; whether that takes a new lease. Raises LeaseRefused if it never does."""
        try:
            reason = member_of(refusal.reason, REASONS)
        except Malformed as error:
            raise self._calls.nonsense("a lease", str(error)) from error
        if reason is Reason.ENDED:  # granted to a call of ours that broke off before it heard so
            return True
        if reason not in (Reason.FULL, Reason.CLOSING):
            raise LeaseRefused(reason, refusal.what)
        pause_s = refusal.retry_after_ms / 1000 * random.uniform(0.5, 1.5)
        if time.monotonic() + pause_s >= until_s:
            raise self._calls.late("a lease", wait_s, refusal.what)
        await asyncio.sleep(pause_s)
        return False

    async def _end(self, lease: Lease, outcome: LeaseOutcome) -> None:
        request = wire.EndLeaseRequest(lease_id=lease.lease_id, outcome=OUTCOMES[outcome], tokens=lease.tokens)
        try:
            reply = await self._calls.lease_ended(request)
        except (DeadlineExceeded, SchedulerError) as error:
            log.warning("the end of a lease could not be told", lease_id=lease.lease_id, why=str(error))
            return
        if reply.verdict == wire.END_VERDICT_MALFORMED:
            raise ContractError(f"the end of lease {lease.lease_id} is malformed: {reply.what}")

    async def _tell_engine(self, what: str, method: str, request: Any) -> Standing:
        reply = await self._calls.answer(what, method, request)
        if reply.standing == wire.ENGINE_STANDING_MALFORMED:
            raise ContractError(f"{what} is malformed: {reply.what}")
        try:
            return member_of(reply.standing, STANDINGS)
        except Malformed as error:
            raise self._calls.nonsense(what, str(error)) from error

    async def _trouble(self, engine: EngineOffered, state: Callable[[], EngineState]) -> str:
        """Beat, after an offer if need be; what stands in the way, if that may pass."""
        try:
            standing = await self.beat(engine, state())
            if standing is Standing.UNKNOWN:
                standing = await self.offer(replace(engine, weight_version=state().weight_version))
                if standing is Standing.KNOWN:
                    standing = await self.beat(engine, state())
        except DeadlineExceeded as error:
            return str(error)
        if standing in (Standing.OVER, Standing.CONFLICT):
            raise NotTaken(
                f"engine {engine.engine_id}, incarnation {engine.incarnation}, is not taken: {standing}",
                expected="one incarnation of it at a time, offered always with the same facts",
                to_do="end it, or start it anew: under another incarnation, or under another id where that is taken",
            )
        return "" if standing is Standing.KNOWN else f"the scheduler's answer is: {standing}"


def _new_lease_id() -> str:
    return secrets.token_hex(16)


def _question(lease_id: str, turn: Turn, hold_s: float, left_s: float) -> Any:
    return wire.AskLeaseRequest(
        lease_id=lease_id,
        trajectory_id=turn.trajectory_id,
        group_id=turn.group_id,
        turn=turn.number,
        context_tokens=turn.context_tokens,
        min_version=turn.min_version,
        wait_ms=left_s * 1000,
        hold_ms=hold_s * 1000,
        avoid=turn.avoid[-AVOIDED_MAX:],
        group_size=turn.group_size,
        evaluation=turn.evaluation,
    )


def _lease(lease_id: str, grant: Any) -> Lease:
    return Lease(
        lease_id,
        grant.engine_id,
        grant.incarnation,
        grant.address,
        grant.weight_version,
        grant.affine,
        time.monotonic() + grant.hold_ms / 1000,
        grant.token,
        grant.counts_address,
        grant.keep_rank,
    )
