"""What a serving engine owes its users."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in seconds: time to the first token, and mean time per token after it. Raises ConfigError."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (0 < self.ttft_s < math.inf and 0 < self.tpot_s < math.inf):
            raise ConfigError(
                f"no SLO: ttft_s = {self.ttft_s}, tpot_s = {self.tpot_s}", expected="finite seconds above 0"
            )
