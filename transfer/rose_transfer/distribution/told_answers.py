"""What a publisher tells of its versions' answers, in memory: one that was started again knows none of before."""

from __future__ import annotations

from collections.abc import Container

from rose_transfer.distribution import known_answer
from rose_transfer.distribution.known_answer import KnownAnswer
from rose_transfer.distribution.offer import Offer


class ToldAnswers:
    """`text` is for an `Outlet`."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, bytes]] = {}

    def tell(self, offer: Offer, answer: KnownAnswer) -> None:
        """Before the version is announced: who asks at once is told. Raises ValueError for log-probs that are none."""
        self._told[known_answer.ask_key(offer)] = offer.version, known_answer.to_bytes(answer)

    def keep_only(self, versions: Container[int]) -> None:
        """Forget those of all other versions."""
        self._told = {key: told for key, told in self._told.items() if told[0] in versions}

    async def text(self, key: str) -> bytes | None:
        told = self._told.get(key)
        return None if told is None else told[1]
