"""A run's own engine at its scheduler: with room from its first answer to its death, and never between versions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from service_tools import LONG_S, site, turn, until

from rose.trainer import offering
from rose.trainer.offering import Offering


@dataclass
class Incarnation:
    """A `LiveEngine`, as far as it is offered."""

    incarnation: str
    engine_id: str = "engine-0"
    base_url: str = "http://engine-0"
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    page: Any = field(default_factory=lambda: SimpleNamespace(kv_tokens=4096, token_s=0.125))


def test_an_incarnation_is_offered_until_its_death_with_the_version_that_it_serves(monkeypatch: Any) -> None:
    monkeypatch.setattr(offering, "BEAT_EVERY_S", 0.01)

    async def check() -> None:
        serving: dict[str, int | None] = {"engine-0": None}
        async with asyncio.timeout(LONG_S), site() as here:

            def engines() -> list[Any]:
                return [(each.incarnation, each.weight_version, each.slots) for each in here.desk.core.engines]

            made = Offering(here.client, 7)
            keeping = asyncio.create_task(made.run(serving.get))
            first, second = Incarnation("a"), Incarnation("b")
            made.joins(first)  # type: ignore[arg-type]
            await until(lambda: engines() == [("a", 0, 0)])
            serving["engine-0"] = 3
            await until(lambda: engines() == [("a", 3, 7)])
            (engine,) = here.desk.core.engines
            assert (engine.pool.capacity_tokens, engine.token_s) == (4096, 0.125)
            async with here.client.lease(turn(min_version=3), wait_s=LONG_S, hold_s=LONG_S) as lease:
                assert (lease.address, lease.counts_address) == ("http://engine-0", "")
                serving["engine-0"] = None
                await until(lambda: engines() == [("a", 0, 0)])
            first.dead.set()
            await until(lambda: engines() == [])
            serving["engine-0"] = 4
            made.joins(second)  # type: ignore[arg-type]
            await until(lambda: engines() == [("b", 4, 7)])
            keeping.cancel()

    asyncio.run(check())
