"""What a lent guest starts from: a model folder, before any version of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What each guest starts from: a model folder, under a number that nobody is told."""

    path: Path
    version: int = 0

    async def starting(self, engine_id: str, lost_incarnation: str | None) -> BaseModel:
        return self

    async def joined(self, engine_id: str, incarnation: str, version: int) -> None:
        pass
