"""By which rules the guest is kept in each phase: the product's, or one open quota where a phase has none."""

from __future__ import annotations

from collections.abc import Sequence

from bench.coserving_phases import Phase, Place
from rose.slo import Slo
from rose_executor.board_states import Quota
from rose_executor.guest_rules import Freeze, GuestRules, Looked, Write
from rose_executor.kv_budget import FixedBlocks, KvBudget, KvShare
from rose_executor.kv_policy import KvPolicy, KvPool
from rose_executor.slack import SlackPolicy

GUEST_SEQS = 64
GUEST_KV_BYTES = 64 * 2**20
SERVING_KV_BYTES = 64 * 2**20
PREFILL_TOKENS = 512
MOVE_AFTER_S = 2.0
_BLOCKS_MAX = 2**31


class FixedQuota:
    """What stands for the product's rules where a phase has no admission: one quota, renewed at each look."""

    def __init__(self, *, gate_open: bool) -> None:
        self.kv: KvShare = FixedBlocks(_BLOCKS_MAX)
        self._quota = Quota(_BLOCKS_MAX, PREFILL_TOKENS + GUEST_SEQS, GUEST_SEQS, gate_open)

    def step(self, event: Looked, now: float) -> Sequence[Write | Freeze]:
        return [Write(self._quota)]


def rules_of(phase: Phase, slo: Slo | None, interference: float) -> GuestRules:
    """`interference` is what the partitioner says of a guest below serving."""
    if not phase.guest or not phase.admits:
        return FixedQuota(gate_open=phase.guest)  # type: ignore[return-value]
    assert slo is not None
    policy = SlackPolicy(
        slo,
        tokens_max=PREFILL_TOKENS + GUEST_SEQS,
        seqs_max=GUEST_SEQS,
        interference=interference if phase.place is Place.BELOW else 1.0,
    )
    return GuestRules(policy, _share(phase), MOVE_AFTER_S)


def _share(phase: Phase) -> KvShare:
    if phase.pool is None:
        return FixedBlocks(_BLOCKS_MAX)
    both = SERVING_KV_BYTES + GUEST_KV_BYTES
    return KvBudget(KvPolicy(KvPool(round(phase.pool * both), SERVING_KV_BYTES, GUEST_KV_BYTES)))
