"""What a store offers: the number of its newest version, and which bits that number stands for. Pure.

A number alone does not say it: a trainer that starts from scratch counts from the beginning again. So the key of an
announcement has the version's fingerprint in it, and who hears a number of old with other bits knows at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rose.errors import TransferError
from rose_transfer.transport.interface import Announcement

_KEY = re.compile(r"version-(0|[1-9][0-9]{0,18})-([0-9a-f]{64})")


class MalformedOffer(TransferError):
    """What was announced is no version of weights: the server is another one than it should be, or broken."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A version and its fingerprint (see `store.manifest`)."""

    version: int
    fingerprint: str

    @property
    def announcement(self) -> Announcement:
        return Announcement(self.version, f"version-{self.version}-{self.fingerprint}")


def offer_of(announced: Announcement) -> Offer:
    """The offer in an announcement. Raises MalformedOffer if it is none."""
    found = _KEY.fullmatch(announced.key)
    if found is None or int(found[1]) != announced.version:
        raise MalformedOffer(
            f"version {announced.version} is announced as {announced.key[:80]!r}",
            expected="version-<number>-<fingerprint>",
            to_do="connect to a publisher or a relay of weights",
        )
    return Offer(announced.version, found[2])
