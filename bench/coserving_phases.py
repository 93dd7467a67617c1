"""What is compared: how a guest shares the core with the serving engine, phase by phase.

phase              cores                     admission        KV memory
alone              no guest has work         -                -
naive              guest like any process    none             fixed
static_split       below, at most `SHARE`    none             fixed
partitioner        guest below serving       none             fixed
admission          guest like any process    slack            fixed
memory             guest below serving       slack            policy, in a pool that is too small for both
ours               guest below serving       slack            policy
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SHARE = 0.5
"""Of the core, for the guest: a static split in halves."""


class Place(StrEnum):
    """Where the guest's processes stand."""

    BESIDE = "beside"
    """Like any other process."""
    CAPPED = "capped"
    """Below, and never more than `SHARE` of the core."""
    BELOW = "below"
    """Where the product's partitioner puts them."""


@dataclass(frozen=True, slots=True)
class Phase:
    """`guest`: whether it has work. `admits`: whether it asks for slack. `pool`: share of both caches that exists."""

    name: str
    guest: bool = True
    place: Place = Place.BELOW
    admits: bool = False
    pool: float | None = None


ALONE = Phase("alone", guest=False)
NAIVE = Phase("naive", place=Place.BESIDE)
OURS = Phase("ours", admits=True, pool=1.0)
PHASES = (
    ALONE,
    NAIVE,
    Phase("static_split", place=Place.CAPPED),
    Phase("partitioner"),
    Phase("admission", place=Place.BESIDE, admits=True),
    Phase("memory", admits=True, pool=0.6),
    OURS,
)
