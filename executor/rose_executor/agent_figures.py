"""What an executor shows of itself: metrics, and the parts of its status page."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import Gauge

from rose.metrics import ExecutorMetrics
from rose.slo import Slo
from rose.status import StatusBoard
from rose.waits import WaitBoard
from rose_executor.board_states import GuestState, ServingState
from rose_executor.guest_life import GuestLife
from rose_executor.guest_presence import GuestPresence, Presence
from rose_executor.guest_rules import GuestRules
from rose_executor.guest_watch import GuestWatch
from rose_executor.kv_budget import MemoryFigures
from rose_executor.lender import Lender
from rose_executor.lending import Lent
from rose_executor.meters import Growth, Share
from rose_executor.tiers import Tier, TierNow
from rose_executor.version_follower import Followed

_MS = 1000


class AgentFigures:
    """Shows what `show` is given. `slo` is the serving engine's, `tier_of` says which tier a state of it comes to.

    `unkept` says why what was learnt of the guest's steps could last not be kept, "" if it could. `presence` is the
    guest's, None before it has any.
    """

    def __init__(
        self,
        metrics: ExecutorMetrics,
        status: StatusBoard,
        waits: WaitBoard,
        slo: Slo,
        tier_of: Callable[[ServingState | None], TierNow],
        unkept: Callable[[], str],
    ) -> None:
        self._metrics = metrics
        self._status = status
        self._waits = waits
        self._tier_of = tier_of
        self._unkept = unkept
        self._computed = {"serving": Share(), "guest": Share()}
        self._open = Share()
        self._preemptions, self._moved, self._starvations = Growth(), Growth(), Growth()
        self._cuts, self._turns = Growth(), Growth()
        self._reborn = False
        self._said: GuestState | None = None
        self._engine = ("starting", "")
        self.presence: GuestPresence | None = None
        metrics.slo_seconds.labels(what="ttft").set(slo.ttft_s)
        metrics.slo_seconds.labels(what="tpot").set(slo.tpot_s)

    def engine(self, state: str, detail: str) -> None:
        """The guest's process has come into another state, as its supervisor says."""
        self._engine = (state, detail)

    def restarted(self) -> None:
        self._metrics.guest_restarts.inc()
        self._reborn = True

    def answered_wrongly(self) -> None:
        self._metrics.wrong_answers.inc()

    def show_guest(self, proof: tuple[str, str], health: str) -> None:
        """Once a moment: what its known answer has shown, and when it is started again."""
        self._status.part("known answer", *proof)
        self._status.part("restarts", "waits" if health else "none due", health)

    def followed(self, followed: Followed, fetched_bytes: int) -> None:
        self._metrics.fetched_bytes.inc(fetched_bytes)
        self._metrics.pause_seconds.observe(followed.pause_ms / _MS)
        self._metrics.weight_version.set(followed.version)

    def show(self, watch: GuestWatch, life: GuestLife | None, lent: Lent, lender: Lender, tokens: int) -> None:
        """Once a moment."""
        now_s = time.monotonic()
        # Without a board to look at, what was seen last is not what is there.
        serving = None if watch.seen is None or watch.trouble else watch.seen.serving.state
        guest = None if watch.seen is None else watch.seen.guest.state
        self._show_engine("serving", serving, now_s)
        if guest is None and life is not None:
            self._show_idle("guest")  # an engine without work takes no steps, and says nothing
        else:
            self._show_engine("guest", guest, now_s)
        self._heard(guest)
        self._show_profile(watch.profile.steps, now_s)
        self._show_memory(watch.rules.kv.figures(now_s))
        self._show_presence()
        self._metrics.gate_open_ratio.set(self._open_ratio(watch.rules, guest, now_s))
        self._metrics.slots_open.set(0 if life is None or life.followed is None else lent.slots)
        self._metrics.guest_tokens.set(tokens)
        self._metrics.open_waits.set(len(self._waits.snapshot()))
        self._show_tier(serving)
        self._status.part("serving", *_serving_words(watch, serving))
        self._status.part("guest", *self._guest_words(life, guest, lent))
        self._status.part("follower", *_follower_words(life))
        self._status.part("scheduler", *_scheduler_words(lender))
        self._status.fact("guest tokens", tokens)

    def _heard(self, guest: GuestState | None) -> None:
        if guest is None and self._reborn:
            # Not before: for a while the board still tells of the one that died.
            self._preemptions, self._moved, self._starvations, self._reborn = Growth(), Growth(), Growth(), False
            self._said = None
        if guest is not None:
            self._metrics.preemptions.inc(self._preemptions.by(guest.preemptions))
            self._metrics.moved.inc(self._moved.by(guest.moved))
            self._metrics.starvations.inc(self._starvations.by(guest.starvations))
            self._said = guest

    def _show_engine(self, who: str, state: ServingState | GuestState | None, now_s: float) -> None:
        if state is None:
            self._computed[who] = Share()
            for gauge in self._of_engines():
                gauge.remove_by_labels({"who": who})
            return
        compute, kv_used, requests = (gauge.labels(who=who) for gauge in self._of_engines())
        compute.set(self._computed[who].saw(state.busy_s, now_s))
        kv_used.set(state.kv_blocks_used / max(1, state.kv_blocks_total))
        requests.set(state.running)

    def _show_tier(self, serving: ServingState | None) -> None:
        now = self._tier_of(serving)
        for tier in Tier:
            self._metrics.tier.labels(tier=tier).set(tier is now.tier)
        self._status.part("tier", now.tier, now.words)

    def _open_ratio(self, rules: GuestRules, guest: GuestState | None, now_s: float) -> float:
        if guest is not None and guest.running + guest.waiting > 0:
            return self._open.saw(guest.open_s, now_s)
        # Without work it asks for nothing: what it would get is as good as what it gets.
        self._open = Share()
        return float(rules.might_compute)

    def _show_memory(self, memory: MemoryFigures | None) -> None:
        if memory is None:
            self._status.part("memory", "fixed split", "the guest may use its whole cache, whatever serving needs")
            return
        self._metrics.kv_budget_bytes.set(memory.budget_bytes)
        self._metrics.kv_held_bytes.set(memory.held_bytes)
        self._metrics.kv_frozen.set(memory.frozen)
        self._metrics.kv_cuts.inc(self._cuts.by(memory.cuts))
        self._metrics.kv_turns.inc(self._turns.by(memory.turns))
        state, mib = "frozen" if memory.frozen else "planned", memory.budget_bytes // 2**20
        held_mib = memory.held_bytes // 2**20
        words = f"{mib} MiB may be the guest's, {held_mib} are; {memory.cuts} cuts so far"
        if memory.unfit:
            state, words = "too small", f"{memory.unfit}; {words}"
        if memory.gives_back is False:
            words += "; the guest gives no memory back"
        self._status.part("memory", state, words)

    def _show_profile(self, kept_steps: int, now_s: float) -> None:
        """That of the guest, which it plans by. One that says nothing learns nothing: what it said last still holds.

        Before it has said anything, what is known is the profile that it begins with.
        """
        self._metrics.step_margin.set(1.0 if self._said is None else self._said.step_margin)
        state, detail = _profile_words(self._said, kept_steps, now_s)
        unkept = self._unkept()
        self._status.part(
            "step profile", state, f"{detail}; what is learnt is not kept: {unkept}" if unkept else detail
        )

    def _show_presence(self) -> None:
        presence, metrics = self.presence, self._metrics
        if presence is None:
            return
        for state in Presence:
            metrics.presence.labels(state=state).set(state is presence.state)
        if presence.residue_bytes is not None:
            metrics.presence_bytes.labels(state=Presence.ASLEEP).set(presence.residue_bytes)
        for state, seconds in ((Presence.ASLEEP, presence.wake_s), (Presence.GONE, presence.start_s)):
            if seconds is not None:
                metrics.presence_seconds.labels(state=state).set(seconds)

    def _show_idle(self, who: str) -> None:
        self._computed[who] = Share()
        for gauge in self._of_engines():
            gauge.labels(who=who).set(0)

    def _of_engines(self) -> tuple[Gauge, Gauge, Gauge]:
        return self._metrics.compute_ratio, self._metrics.kv_used_ratio, self._metrics.requests

    def _guest_words(self, life: GuestLife | None, guest: GuestState | None, lent: Lent) -> tuple[str, str]:
        if self.presence is not None and self.presence.state is not Presence.ACTIVE:
            return presence_words(self.presence)
        if life is None:
            return self._engine
        if life.followed is None:
            return "waits for weights", "it runs no version of the run yet"
        if lent.why:
            return "held back", lent.why
        if guest is not None and guest.starved_at_s:
            for_s = time.monotonic() - guest.starved_at_s
            return (
                "starved",
                f"its quota is below what any of {guest.waiting} waiting requests needs, for {for_s:.1f} s",
            )
        load = "idle" if guest is None else f"{guest.running} running, {guest.waiting} waiting"
        return "lent", f"{lent.slots} requests may be on it; {load}"


def presence_words(presence: GuestPresence) -> tuple[str, str]:
    """What a guest is that is asleep or gone, and what is known of what that costs."""
    words = [presence.why]
    if presence.state is Presence.ASLEEP:
        if presence.residue_bytes is not None:
            words.append(f"holds {presence.residue_bytes // 2**20} MiB")
        if presence.wake_s is not None:
            words.append(f"woke in {presence.wake_s:.1f} s last time")
    elif presence.start_s is not None:
        words.append(f"started in {presence.start_s:.1f} s last time")
    return presence.state, ", ".join(words)


def _serving_words(watch: GuestWatch, serving: ServingState | None) -> tuple[str, str]:
    if watch.trouble:
        return "unknown", watch.trouble
    if serving is None:
        return "unknown", "nobody has looked yet" if watch.seen is None else watch.seen.serving.why
    slack = f"slack {watch.rules.slack_s * _MS:.0f} ms"
    if serving.idle:
        return "idle", slack
    return "serving", f"{serving.decoding} answering, {serving.unanswered} before their first token, {slack}"


def _scheduler_words(lender: Lender) -> tuple[str, str]:
    if lender.trouble is None:
        return "not asked yet", "there is no guest to offer yet"
    return "no answer" if lender.trouble else "reached", lender.trouble


def _profile_words(guest: GuestState | None, kept_steps: int, now_s: float) -> tuple[str, str]:
    if guest is None and kept_steps:
        return "kept", f"from {kept_steps} steps; the guest has not said yet what its own cost"
    if guest is None:
        return "unknown", "the guest has not said yet what its steps cost"
    if not guest.profile_steps:
        return "unknown", "no step was seen yet: the guest begins with a few tokens"
    if not guest.drifted_at_s:
        return "holds", f"learnt from {guest.profile_steps} steps"
    for_s = now_s - guest.drifted_at_s
    return "drifted", f"for {for_s:.0f} s, by a factor of {guest.drift_factor:.2f}; margin {guest.step_margin:.2f}"


def _follower_words(life: GuestLife | None) -> tuple[str, str]:
    if life is None:
        return "waits for the guest", ""
    if life.followed is None:
        return "waits for weights", ""
    return "following", f"version {life.followed.version}"
