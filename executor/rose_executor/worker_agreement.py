"""What the workers of one engine (tensor and pipeline parallel) tell each other, so that none of them goes alone.

Invariants
- Whoever is asked for something that others wait in tells them how it went, also where it failed or had nothing to do.
- What `agree` raises at one worker it raises at all of them, if not with the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rose.errors import EngineError, TransferError
from rose_transfer.distribution import Offer


@dataclass(frozen=True, slots=True)
class Told:
    """What one worker tells the others."""

    failed: str
    goal: Offer | None


def agree(failed: Exception | None, goal: Offer | None = None) -> None:
    """Raise `failed`, or that another worker of this engine has failed, or has another goal. Every worker must call it.

    Raises EngineError if the others do not answer. It waits for the slowest one, at most as long as vLLM's process
    groups allow: a worker that died ends the engine.
    """
    from vllm.distributed import parallel_state

    told = [Told("" if failed is None else str(failed) or type(failed).__name__, goal)]
    for group in (parallel_state.get_tp_group(), parallel_state.get_pp_group()):
        if group.world_size > 1:
            told = exchange(told, group)
    if failed is not None:
        raise failed
    for one in told:
        if one.failed:
            raise TransferError(f"another worker failed: {one.failed}")
    goals = {one.goal for one in told if one.goal is not None}
    if len(goals) > 1:
        words = sorted(f"version {offer.version} ({offer.fingerprint[:16]}…)" for offer in goals)
        raise TransferError(
            f"the workers of this engine were brought different weights: {' and '.join(words)}",
            expected="the same version, of one training, for all of them",
            to_do="tell all workers one version; where they were told one, update again",
        )


def exchange(told: list[Told], group: Any) -> list[Told]:
    """What all workers of one of vLLM's groups tell. Raises EngineError that names this worker and the wait."""
    heard: list[list[Told]] = [[] for _ in range(group.world_size)]
    try:
        dist.all_gather_object(heard, told, group=group.cpu_group)
    except RuntimeError as error:  # as torch says it, be it late or gone
        raise EngineError(
            f"worker {group.rank_in_group} of {group.world_size}: not all others have said how their part of the "
            f"weight update went: {error}",
            expected="an answer of each within the time limit of vLLM's process groups",
            to_do="see the logs of the other workers for the one that hangs, and start the engine anew",
        ) from error
    return [one for worker in heard for one in worker]
