"""What became of one request of a replay, seen from the client's side; one line of JSON each.

Invariants
- Times are seconds since the replay began, on the client's own clock that never goes back.
- A request that was due has exactly one record, whatever became of it.
- `first_s` and `last_s` are there if and only if a token arrived.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    """Every token that was asked for arrived, and the stream ended as it should."""
    REFUSED = "refused"
    """The engine answered with an error."""
    BROKEN = "broken"
    """No connection, or a stream that ended early or is no stream of tokens."""
    TIMED_OUT = "timed_out"
    """Not ended by its deadline."""
    OVER_CAP = "over_cap"
    """Never sent: as many as the client allows were already in flight. Charged to the engine."""
    CUT = "cut"
    """Ended by the end of the replay itself: says nothing about the engine."""


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One request.

    `gaps_s` are the times between successive arrivals that brought tokens; their sum is `last_s - first_s`.
    `loop_lag_s` is the longest that the client itself stood still meanwhile: no figure of this request is more exact.
    """

    index: int
    outcome: Outcome
    due_s: float
    ended_s: float
    prompt_tokens: int
    asked_tokens: int
    tokens: int = 0
    sent_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    loop_lag_s: float = 0.0
    detail: str = ""

    def __post_init__(self) -> None:
        times = (self.due_s, self.ended_s, self.sent_s, self.first_s, self.last_s, self.loop_lag_s, *self.gaps_s)
        if not all(one is None or math.isfinite(one) for one in times):
            raise ValueError(f"request {self.index} with times {times}")
        if not (self.first_s is None) == (self.last_s is None) == (self.tokens == 0):
            raise ValueError(f"request {self.index}: {self.tokens} tokens from {self.first_s} to {self.last_s} s")
        if self.tokens and self.sent_s is None:
            raise ValueError(f"request {self.index}: {self.tokens} tokens, and never sent")

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the moment it was sent."""
        return None if self.first_s is None or self.sent_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None below two tokens."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def lag_s(self) -> float | None:
        """How much later than due it was sent: the client's own fault."""
        return None if self.sent_s is None else self.sent_s - self.due_s

    @property
    def judges_engine(self) -> bool:
        """Whether its outcome says something about the engine."""
        return self.outcome is not Outcome.CUT


def to_line(record: LoadRecord) -> bytes:
    """With its newline; times to a tenth of a microsecond."""
    values = asdict(record)
    for name, value in values.items():
        if isinstance(value, float):
            values[name] = round(value, 7)
    values["gaps_s"] = [round(gap, 7) for gap in record.gaps_s]
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def from_values(values: Mapping[str, Any]) -> LoadRecord:
    """Of one parsed line. Raises ValueError if it is no record."""
    try:
        return LoadRecord(**{**values, "outcome": Outcome(values["outcome"]), "gaps_s": tuple(values["gaps_s"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record of a request: {error}") from error
